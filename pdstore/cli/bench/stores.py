"""`pdstore bench`: put and get of a store, with the checksum, against the raw calls under it.

It puts values of its own into the pool, 64 MiB at once at most, and removes them again; a full pool
evicts others for them. A pool that does not exist yet is tried in one that is removed again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from rich.console import RenderableType

from pdstore.cli.answer import Answer, muted, table
from pdstore.cli.bench.raw import Raw, raw_of
from pdstore.cli.doctor import opened
from pdstore.errors import BadValue, ConfigError
from pdstore.format import block
from pdstore.format.keys import BlockKey, Json
from pdstore.settings import read_settings
from pdstore.store.base import Slots, Store
from pdstore.store.connect import place_of
from pdstore.store.optional import ALL_KEYS
from pdstore.store.url import Place, StoreURL

_SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
_BATCH = 16
_MATCH_KEYS = 1024
_COLUMNS = (
    *("value", "verb", ">raw", ">xxh3", ">pdstore"),
    *(">of ideal", ">store/raw", ">p50 ms", ">p99 ms"),
)
_NAMES = [name.lstrip(">") for name in _COLUMNS]
_LEGEND = (
    "GB/s (10^9 bytes); raw: the plain calls, of shm:// and of several tiers a copy in memory;"
    " of ideal: pdstore against 1/(1/raw + 1/xxh3), one after the other; store/raw: a get without"
    " the checksum"
)
Cell = float | int | str
_NAMESPACE = b"bench".ljust(16, b"\0")


class _Case(NamedTuple):
    """One store, one size of value, one batch."""

    store: Store
    raw: Raw
    size: int
    num_values: int


class _Times(NamedTuple):
    """Seconds of each way, a list entry a round."""

    raw_put: list[float]
    put: list[float]
    raw_get: list[float]
    get: list[float]
    plain_get: list[float]  # get without verify: what the store alone does
    checksum: list[float]


def bench(url: str | None, rounds: int) -> Answer:
    """Measures a store; in each round the ways take turns on the same buffers.

    url: the store; None takes PDSTORE_STORE. rounds: for batches; single values have ten times as
    many, since percentiles are told of them.
    Raises ConfigError for a store without room, and StoreError when it does not answer.
    """
    settings = read_settings(**({"store": url} if url else {}))
    place = place_of(settings.store, settings)
    rows: list[list[Cell]] = []
    with (
        _trying(place),
        opened(settings, place) as store,
        tempfile.TemporaryDirectory() as elsewhere,
    ):
        with tempfile.TemporaryDirectory(
            prefix=".bench-", dir=_beside(place.path) or elsewhere
        ) as temporary:
            scheme = StoreURL.of(settings.store).scheme  # empty for several tiers
            raw = raw_of(scheme, settings.store, store, Path(temporary))
            for name, size in _SIZES.items():
                for count in (_BATCH, 1):
                    rows += _measure(_Case(store, raw, size, count), name, rounds)
        rows.append(_measure_match(store, max(rounds * 10, 100)))
        label = store.label
    title = f"{label}, {rounds} rounds in turn"
    documents: list[Json] = [dict(zip(_NAMES, row, strict=True)) for row in rows]
    shown: list[RenderableType] = [
        title,
        table(_COLUMNS, [[_shown(cell) for cell in row] for row in rows]),
        muted(_LEGEND),
    ]
    document: Json = {"store": label, "machine": {**machine()}, "rounds": rounds, "rows": documents}
    return Answer(document, shown)


def machine() -> dict[str, str | int]:
    """Describes the machine that the numbers were measured on."""
    return {
        "cpus": os.cpu_count() or 0,
        "processor": platform.processor() or platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def seconds_of(function: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextlib.contextmanager
def _trying(place: Place) -> Iterator[None]:
    """Removes at the end each pool of files that the code inside makes, unless others use it."""
    missing = [path for tier in place.tiers if (path := tier.missing_path) is not None]
    try:
        yield
    finally:
        for path in missing:
            if path.is_dir() and not any(path.rglob(f"{ALL_KEYS}*")):
                shutil.rmtree(path)


def _beside(path: Path | None) -> Path | None:
    """Returns a directory on the file system of a pool of files, outside it where that is possible.

    None for a pool that is no directory.
    """
    if path is None or not path.is_dir():
        return None
    parent = path.resolve().parent
    is_same = parent.stat().st_dev == path.stat().st_dev
    return parent if is_same and os.access(parent, os.W_OK) else path


def _shown(cell: Cell) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _percentiles_ms(seconds: Sequence[float]) -> tuple[Cell, Cell]:
    """Returns the 50th and the 99th percentile; blanks for a single measurement."""
    if len(seconds) < 2:
        return "", ""
    percentiles = quantiles(seconds, n=100)
    return percentiles[49] * 1e3, percentiles[98] * 1e3


def _check_all(done: int, wanted: int, verb: str) -> None:
    """Raises ConfigError if a store has not moved all values: then nothing can be measured."""
    if done < wanted:
        raise ConfigError(
            f"the store {verb} {done} of {wanted} values: give it room for 128 MiB that nothing"
            " leases, or measure when less runs"
        )


def _measure_match(store: Store, rounds: int) -> list[Cell]:
    """Measures one match of 1,024 stored keys."""
    keys = [BlockKey(f"pds1:bench:{secrets.token_hex(16)}") for _ in range(_MATCH_KEYS)]
    slots = Slots(memoryview(bytearray(64)), 64, [0] * _MATCH_KEYS, [64] * _MATCH_KEYS)
    try:
        _check_all(store.put(keys, slots), _MATCH_KEYS, "took")
        _check_all(store.match(keys), _MATCH_KEYS, "kept")
        seconds = [seconds_of(lambda: store.match(keys)) for _ in range(rounds)]
    finally:
        store.remove(keys)
    return [f"{_MATCH_KEYS} keys", "match", *[""] * 5, *_percentiles_ms(seconds)]


def _measure(case: _Case, name: str, rounds: int) -> list[list[Cell]]:
    if case.num_values == 1:
        rounds = max(rounds * 10, 100)  # for percentiles
    times = _run(case, rounds)
    num_bytes = case.size * case.num_values / 1e9
    checksum = num_bytes / median(times.checksum)
    rows: list[list[Cell]] = []
    for verb, raw, ours, alone in (
        ("put", times.raw_put, times.put, None),
        ("get", times.raw_get, times.get, times.plain_get),
    ):
        raw_rate, rate = num_bytes / median(raw), num_bytes / median(ours)
        ideal = 1 / (1 / raw_rate + 1 / checksum)
        alone_ratio = median(raw) / median(alone) if alone else ""
        p50, p99 = _percentiles_ms(ours)
        rates = (raw_rate, checksum, rate, rate / ideal, alone_ratio)
        label = f"{name} x {case.num_values}"
        rows.append([label, verb, *rates, p50, p99])
    return rows


def _run(case: _Case, rounds: int) -> _Times:
    slot_bytes = -(-case.size // 4096) * 4096
    view = case.store.allocate(slot_bytes * case.num_values)
    view[:] = secrets.token_bytes(len(view))
    slots = Slots(view, slot_bytes, range(case.num_values), [case.size] * case.num_values)
    times = _Times([], [], [], [], [], [])
    for turn in range(rounds + 1):  # the first warms up
        headers = [_header(case.size, secrets.token_bytes(16)) for _ in range(case.num_values)]
        keys = [BlockKey(f"pds1:bench:{h.prefix_hash.hex()}") for h in headers]
        one = _turn(case, slots, keys, headers, raw_first=turn % 2 == 0)
        if turn:
            for series, value in zip(times, one, strict=True):
                series.append(value)
    return times


def _turn(
    case: _Case,
    slots: Slots,
    keys: Sequence[BlockKey],
    headers: Sequence[block.Header],
    *,
    raw_first: bool,
) -> list[float]:
    store, raw = case.store, case.raw

    def seal_all() -> None:
        for i, header in enumerate(headers):
            block.seal(slots.value(i), header)

    def put() -> None:
        seal_all()
        _check_all(store.put(keys, slots), len(keys), "took")

    def get() -> None:
        _check_all(store.get(keys, slots), len(keys), "gave back")
        _verify_all(slots, headers)

    seconds: dict[Callable[[], object], float] = {}
    ways: list[Callable[[], object]] = [
        lambda: raw.put(keys, slots),
        put,
        lambda: raw.get(keys, slots),
        get,
        lambda: store.get(keys, slots),
        seal_all,
    ]
    order = ways if raw_first else [ways[1], ways[0], ways[3], ways[4], ways[2], ways[5]]
    seal_all()
    try:
        for way in order:
            seconds[way] = seconds_of(way)
    finally:
        store.remove(keys)
        raw.remove(keys)
    return [seconds[way] for way in ways]


def _verify_all(slots: Slots, headers: Sequence[block.Header]) -> None:
    for i, header in enumerate(headers):
        if block.verify(slots.value(i), header) is not None:
            raise BadValue("a value came back changed: run `pdstore doctor`")


def _header(size: int, prefix_hash: bytes) -> block.Header:
    return block.Header(0, 0, 0, 1, 64, size - block.HEADER_BYTES, _NAMESPACE, prefix_hash)
