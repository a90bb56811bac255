"""put and get of a store, with the checksum, against the raw calls that it stands on.

python -m benchmarks.stores [--store redis://localhost:6379/0] [--json FILE]
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from benchmarks.command import parser_of, run
from benchmarks.raw import Raw, raw_of
from benchmarks.report import Report, seconds_of
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots, Store
from pdstore.store.url import StoreURL

_SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
_BATCH = 16
_MATCH_KEYS = 1024
_COLUMNS = (
    *("store", "value", "verb", "raw", "xxh3", "pdstore"),
    *("of ideal", "store/raw", "p50 ms", "p99 ms"),
)
_NAMESPACE = b"bench".ljust(16, b"\0")


class _Case(NamedTuple):
    """One store, one size of value, one batch."""

    name: str
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


def bench_stores(urls: Sequence[str], directory: Path, rounds: int) -> Report:
    """Measures each store; in each round the ways take turns on the same buffers.

    Raises ConfigError for a store whose raw calls are unknown, StoreError when it does not answer.
    """
    report = Report(
        f"GB/s with checksum, {rounds} rounds in turn; 'of ideal' is against 1/(1/raw + 1/xxh3)",
        _COLUMNS,
    )
    with tempfile.TemporaryDirectory(prefix="pdstore-bench-", dir=directory) as temporary:
        settings = read_settings(store="file://")
        for url in urls or [f"file://{temporary}/store?budget=8GiB"]:
            store = open_store(url, settings)
            raw = raw_of(url, store, Path(temporary))
            for name, size in _SIZES.items():
                for count in (_BATCH, 1):
                    _measure(report, _Case(_name_of(url), store, raw, size, count), name, rounds)
            _measure_match(report, _name_of(url), store, max(rounds * 10, 100))
            store.close()
    return report


def _name_of(url: str) -> str:
    """Returns the scheme, and the kind of a Mooncake pool."""
    parsed = StoreURL.of(url)
    return " ".join([parsed.scheme, *parsed.options.get("topology", "").split()])


def _measure_match(report: Report, name: str, store: Store, rounds: int) -> None:
    """Measures one match of 1,024 stored keys."""
    keys = [BlockKey(f"pds1:bench:{secrets.token_hex(16)}") for _ in range(_MATCH_KEYS)]
    slots = Slots(memoryview(bytearray(64)), 64, [0] * _MATCH_KEYS, [64] * _MATCH_KEYS)
    assert store.put(keys, slots) == _MATCH_KEYS

    def match() -> None:
        assert store.match(keys) == _MATCH_KEYS

    seconds = quantiles([seconds_of(match) for _ in range(rounds)], n=100)
    store.remove(keys)
    blank = [""] * 5
    report.add(name, f"{_MATCH_KEYS} keys", "match", *blank, seconds[49] * 1e3, seconds[98] * 1e3)


def _measure(report: Report, case: _Case, name: str, rounds: int) -> None:
    if case.num_values == 1:
        rounds = max(rounds * 10, 100)  # for percentiles
    times = _run(case, rounds)
    num_bytes = case.size * case.num_values / 1e9
    checksum = num_bytes / median(times.checksum)
    label = f"{name} x {case.num_values}"
    for verb, raw, ours, alone in (
        ("put", times.raw_put, times.put, None),
        ("get", times.raw_get, times.get, times.plain_get),
    ):
        raw_rate, rate = num_bytes / median(raw), num_bytes / median(ours)
        ideal = 1 / (1 / raw_rate + 1 / checksum)
        alone_ratio = median(raw) / median(alone) if alone else ""
        percentiles = [p * 1e3 for p in quantiles(ours, n=100)] if len(ours) > 1 else [0.0] * 99
        rates = (raw_rate, checksum, rate, rate / ideal, alone_ratio)
        report.add(case.name, label, verb, *rates, percentiles[49], percentiles[98])


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
        assert store.put(keys, slots) == len(keys)

    def get() -> None:
        assert store.get(keys, slots) == len(keys)
        for i, header in enumerate(headers):
            assert block.verify(slots.value(i), header) is None

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
    for way in order:
        seconds[way] = seconds_of(way)
    store.remove(keys)
    raw.remove(keys)
    return [seconds[way] for way in ways]


def _header(size: int, prefix_hash: bytes) -> block.Header:
    return block.Header(0, 0, 0, 1, 64, size - block.HEADER_BYTES, _NAMESPACE, prefix_hash)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="URL",
        help="a store to measure, again for more (default: a new file store in --directory)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("/dev/shm"),
        help="where the default file store is made, and removed again (default: %(default)s)",
    )
    given = parser.parse_args()
    run(lambda: bench_stores(given.store, given.directory, given.rounds), given.json)


if __name__ == "__main__":
    main()
