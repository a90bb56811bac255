"""Measures what a thousand waiting hand-offs cost: other lookups, the store, and their own end.

    python -m benchmarks.waiting --json benchmarks/results/waiting.json

D waits for hand-offs that do not come, and asks for stored prompts meanwhile: that is `lookup`. Now
and then P publishes one of the hand-offs: `marker` counts from its `done` to D's answer. Stores
that tell of changes are listened to; the slow one, whose every call takes 2 ms, is polled.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from pdstore.format.block import HEADER_BYTES
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import BlockKey, Namespace, Part
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots, Store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys, TellsChanges
from pdstore.store.wrappers import WrapperStore

NAMESPACE = Namespace({"benchmark": "waiting"}, (Part(0, 0),), block_tokens=64)
COLUMNS = [
    *("store", "waiting", "calls/s", "calls/s with events", "lookup p50, ms", "lookup p99, ms"),
    *("marker best, ms", "marker p50, ms", "marker p99, ms"),
]


class Slow(MemoryStore):
    """A store in memory whose lookups take some time, as over a network."""

    def __init__(self, call_s: float) -> None:
        super().__init__()
        self._call_s = call_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        time.sleep(self._call_s)
        return super().match(keys)

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        time.sleep(self._call_s)
        return super().which_stored(keys)


class Counted(WrapperStore):
    """Counts the calls that look for keys, and lets all else of a store through."""

    passes = (TellsChanges,)

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._inner = store.optional(FindsKeys)
        self.num_calls = 0

    def match(self, keys: Sequence[BlockKey]) -> int:
        self.num_calls += 1
        return super().match(keys)

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        assert self._inner is not None
        self.num_calls += 1
        return self._inner.which_stored(keys)


class CallRate:
    """The calls of a store since this was made."""

    def __init__(self, store: Counted) -> None:
        self._store, self._first = store, store.num_calls
        self._began = time.perf_counter()

    def per_s(self) -> float:
        return (self._store.num_calls - self._first) / (time.perf_counter() - self._began)


def measure(store: Counted, num_waiting: int, seconds: float) -> tuple[float, ...]:
    """Returns the store's calls a second, without events and with, and what each event took."""
    cache = PrefixCacheManager(read_settings(handoff_wait_s=600), NAMESPACE, store=store)
    keys = cache.keys(range(64))
    put(store, keys.store_keys(NAMESPACE.parts))
    waiting = [
        cache.lookup(cache.keys([n, 1, 2]), Handoff(HandoffId.new()).params())
        for n in range(num_waiting)
    ]
    time.sleep(0.5)  # the pauses between looks are long by now
    at_rest = CallRate(store)
    time.sleep(seconds)
    calls_at_rest, with_events = at_rest.per_s(), CallRate(store)
    lookups, markers = [], []
    for _ in range(int(10 * seconds)):
        lookups.append(time_of(lambda: cache.lookup(keys).wait(30)))
        handoff = HandoffId.new()
        lookup = cache.lookup(keys, Handoff(handoff).params())
        time.sleep(0.1)
        done = [handoff.done(NAMESPACE, 0)]
        markers.append(time_of(partial(publish, store, done, lookup)))
    calls_with_events = with_events.per_s()
    for lookup in waiting:
        lookup.cancel()
    cache.close()
    return calls_at_rest, calls_with_events, *spread(lookups), min(markers) * 1e3, *spread(markers)


def publish(store: Store, done: Sequence[BlockKey], lookup: Lookup) -> Match:
    """Puts a hand-off's markers and waits until D has noticed."""
    put(store, done)
    return lookup.wait(30)


def time_of(look: Callable[[], Match]) -> float:
    """Returns the seconds of a lookup, which finds all."""
    began = time.perf_counter()
    found = look()
    assert found.reason is None, found
    return time.perf_counter() - began


def spread(seconds: list[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return median(ordered) * 1e3, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3


def put(store: Store, keys: Sequence[BlockKey]) -> None:
    """Puts small values."""
    size = HEADER_BYTES
    view = memoryview(bytearray(size * len(keys)))
    store.put(list(keys), Slots(view, size, range(len(keys)), [size] * len(keys)))


def measure_all(given: argparse.Namespace) -> Report:
    """Measures each store without and with waiting hand-offs."""
    report = Report("hand-offs that wait", COLUMNS)
    settings = read_settings(native="require")
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        urls = {
            "shm": f"shm://waiting?size=64MiB&dir={directory}",
            "file": f"file://{directory}/files?budget=64MiB",
        }
        for num_waiting in (0, given.waiting):
            slow = measure(Counted(Slow(given.call_ms / 1e3)), num_waiting, given.seconds)
            report.add(f"{given.call_ms:g} ms a call", num_waiting, *slow)
            for name, url in urls.items():
                store = open_store(url, settings)
                report.add(name, num_waiting, *measure(Counted(store), num_waiting, given.seconds))
                store.close()
    return report


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--waiting", type=int, default=1000, help="hand-offs (%(default)s)")
    parser.add_argument("--call-ms", type=float, default=2.0, help="of the slow store")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row, twice")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    given = parser.parse_args()
    run(lambda: measure_all(given), given.json)


if __name__ == "__main__":
    main()
