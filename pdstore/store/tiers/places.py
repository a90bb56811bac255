"""check_places, place_doubts: where the tiers of one pool may not lie, or should not."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

from pdstore.errors import ConfigError
from pdstore.settings import Settings
from pdstore.store.connect import place_of
from pdstore.store.file.mount import Mount, mount_of
from pdstore.store.optional import ServerDoubt
from pdstore.store.tiers.lower import Limits
from pdstore.store.url import Place, Reach, StoreURL

_REACHES = (Reach.PROCESS, Reach.HOST, Reach.SHARED)
_ONE_FOR_ALL = (
    "name a directory that all hosts mount; or let each host have a first tier of its own (shm://),"
    " and purge on each host"
)
_APART = "put them on two disks, or leave one of the tiers away"
_NO_DISK = "name a directory on a disk, or give its memory to the tier above and leave it away"


def without_limits(url: StoreURL) -> str:
    """Returns the URL of a lower tier as its store knows it. Raises ConfigError."""
    url = StoreURL.of(url.text)
    Limits.of(url)
    return url.inner("")


def check_places(url: StoreURL, settings: Settings) -> None:
    """Raises ConfigError for a lower tier that instances with the same first one may not share.

    Also raises it for a place that two of the tiers name.
    """
    first, *others = url.tiers
    places = [place_of(first.text, settings)]
    for each in others:
        place = place_of(without_limits(each), settings)
        if _REACHES.index(place.reach) < _REACHES.index(places[0].reach):
            raise ConfigError(
                f"{each.label} is for {place.reach.value}, and the first tier, {first.label}, for"
                f" {places[0].reach.value}: a lower tier must be there for all instances of the"
                " pool; write the tier of fewer instances first"
            )
        if place.path is not None and place.path in [above.path for above in places]:
            raise ConfigError(f"{each.label} is the place of two tiers: {place.path}; name it once")
        places.append(place)


def place_doubts(
    url: StoreURL, settings: Settings, mount: Callable[[Path], Mount] | None = None
) -> Iterator[ServerDoubt]:
    """Yields what should be changed about the places of several tiers. Opens nothing.

    mount: returns the file system that a path lies on; None: as the system tells it.
    """
    mount = mount or mount_of
    first, *others = url.tiers
    urls = [first.text, *map(without_limits, others)]
    places = [place_of(each, settings) for each in urls]
    labels = [each.label for each in url.tiers]
    is_for_many = _is_for_many_hosts(first, places[0], mount)
    for label, place in zip(labels[1:], places[1:], strict=True):
        if place.path is None or place.is_memory:
            continue
        found = mount(place.path)
        if is_for_many and found.is_of_one_host:
            said = (
                f"{label} is a directory of this host alone ({found.kind}), and other hosts may use"
                f" {labels[0]}, too: then each has other blocks below, and a purge on one leaves"
                " those of the others"
            )
            yield ServerDoubt("own directory", said, _ONE_FOR_ALL)
        if found.kind == "tmpfs":
            yield ServerDoubt("in memory", f"{label} is on a tmpfs, in memory", _NO_DISK)
    of_paths = [(label, place.path) for label, place in zip(labels, places, strict=True)]
    for (label, path), (other, below) in combinations(of_paths, 2):
        if path is not None and below is not None and _device_of(path) == _device_of(below):
            said = f"{label} and {other} are on one file system: they share its room and its speed"
            yield ServerDoubt("one disk", said, _APART)


def _is_for_many_hosts(url: StoreURL, place: Place, mount: Callable[[Path], Mount]) -> bool:
    """Returns whether instances on other hosts may have this first tier, as far as one can see."""
    if place.reach is not Reach.SHARED:
        return False
    if place.path is not None:
        return not mount(place.path).is_of_one_host
    return not ("+unix" in url.scheme or _is_this_host(url.host))


def _is_this_host(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _device_of(path: Path) -> int | None:
    """Returns the number of the file system of a path, which need not exist yet."""
    parts: Sequence[Path] = [path.absolute(), *path.absolute().parents]
    for each in parts:
        with contextlib.suppress(OSError):
            return os.stat(each).st_dev
    return None
