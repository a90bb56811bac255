"""The engine instances of one role, in round robin or by what they had before."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal
from urllib.parse import urlsplit

from pdstore.router.bodies import Json, encode

Role = Literal["prefill", "decode"]

_RETRY_INTERVAL_S = 2.0
_OWN_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass
class Upstream:
    """One engine instance.

    down_until: until then the others are asked first.
    skipped_until: until then nobody waits for it; None unless it let a request wait in vain.
    num_open: requests that it has and has not answered.
    num_outages: how often it could not serve after it could; another one may come back.
    """

    url: str
    role: Role
    down_until: float = 0.0
    skipped_until: float | None = None
    num_open: int = 0
    num_outages: int = 0

    def went_down(self) -> None:
        """Notes that it cannot serve: for a while the others are asked first."""
        self.num_outages += self.down_until == 0.0
        self.down_until = time.monotonic() + _RETRY_INTERVAL_S

    def refused(self, status: int) -> None:
        """Notes a status that says that it began nothing. After 503 the others are asked first.

        A vLLM that stops breaks connections behind such answers: the next request on one is lost.
        """
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.went_down()
        else:
            self.came_back()

    def way_to(self, error: str) -> str:
        """Returns what to do where a connection fails, by the error's words; "" if nothing fits."""
        scheme, _, place = self.url.partition("://")
        if scheme == "https" and "WRONG_VERSION_NUMBER" in error:
            return f": it speaks http: write http://{place}"
        is_refused = "connection attempts failed" in error or "Connection refused" in error
        if is_refused and urlsplit(self.url).hostname not in _OWN_NAMES:
            return ": see that it runs, and that it listens on this address (--host 0.0.0.0)"
        return ""

    def came_back(self) -> None:
        """Notes that it can serve."""
        self.down_until = 0.0

    def timed_out(self, retry_interval_s: float) -> None:
        """Notes that it let a request wait in vain: requests skip it for this many seconds."""
        self.skipped_until = time.monotonic() + retry_interval_s

    def answered(self) -> None:
        """Notes that it answered a request."""
        self.came_back()
        self.skipped_until = None

    def is_skipped(self, retry_interval_s: float) -> bool:
        """True while nobody shall wait for it.

        When the interval is over, one request tries it; the others skip it for one interval more.
        """
        if self.skipped_until is None:
            return False
        now = time.monotonic()
        if now < self.skipped_until:
            return True
        self.skipped_until = now + retry_interval_s
        return False


class Rotation:
    """The instances of one role: each call starts with the next one, or by affinity.

    An instance that was down a moment ago comes last and is never left out: a request fails only
    after every instance was asked.
    """

    def __init__(self, role: Role, urls: Sequence[str], *, by_prefix: bool = False) -> None:
        self.upstreams = [Upstream(url.rstrip("/"), role) for url in urls]
        self._affinity = Affinity() if by_prefix else None
        self._first = 0

    @property
    def num_outages(self) -> int:
        """The number of times that one of the instances could not serve after it could."""
        return sum(upstream.num_outages for upstream in self.upstreams)

    def in_turn(self, body: Json | None = None) -> list[Upstream]:
        """Returns every instance, in the order to try them for one request with this body."""
        if not self.upstreams:
            return []
        first = self._first
        now = time.monotonic()
        self._first = (first + 1) % len(self.upstreams)
        turned = self.upstreams[first:] + self.upstreams[:first]
        if self._affinity is not None and body is not None:
            up = [each for each in turned if max(each.down_until, each.skipped_until or 0.0) <= now]
            chosen = self._affinity.choose(body, up or turned)
            turned.sort(key=lambda upstream: upstream is not chosen)
        return sorted(turned, key=lambda upstream: upstream.down_until > now)


_CHUNK_BYTES = 1024
_MAX_CHUNKS = 1 << 20
_MAX_LOAD = 1.25  # of the mean number of open requests


class Affinity:
    """Remembers for each prefix of a prompt the instance that had it last.

    An instance that had over half of a prompt has it in its own cache; any other one loads it from
    the pool. So the prompt goes there, unless that instance has a quarter more open requests than
    the mean: then, and for a prompt that is new, the one with the fewest open requests is chosen.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, Upstream] = OrderedDict()

    def choose(self, body: Json, upstreams: Sequence[Upstream]) -> Upstream:
        """Returns the instance for a request; `upstreams` are those that can be asked."""
        names = list(_prefixes(body))
        chosen = min(upstreams, key=lambda each: each.num_open)
        most = _MAX_LOAD * (1 + sum(each.num_open for each in upstreams)) / len(upstreams)
        for name in reversed(names[len(names) // 2 :]):
            known = self._seen.get(name)
            if known is not None and known in upstreams and known.num_open < most:
                chosen = known
                break
        for name in names:
            self._seen[name] = chosen
            self._seen.move_to_end(name)
        while len(self._seen) > _MAX_CHUNKS:
            self._seen.popitem(last=False)
        return chosen


def _prefixes(body: Json) -> Iterator[bytes]:
    """Yields a name for each whole chunk of a prompt; it stands for all before it as well."""
    prompt = encode({"": body.get("prompt", body.get("messages"))})
    state = hashlib.blake2b(digest_size=16)
    for end in range(_CHUNK_BYTES, len(prompt) + 1, _CHUNK_BYTES):
        state.update(prompt[end - _CHUNK_BYTES : end])
        yield state.digest()
