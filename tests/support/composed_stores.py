"""Stores made of stores: a wrapper that counts what is moved, and a composite of two stores."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.store.base import Lifecycle, Slots, Store, count_of
from pdstore.store.transfer import MovesValues, Split, Transfer
from pdstore.store.wrappers import HookedStore, StorePart

Ends = tuple[int, int]


class CountingStore(HookedStore):
    """Counts the blocks and tails that are put and got, and their bytes, however they move."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.values: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, verb, keys, call):
        moved = call()
        if not keys or kind_of(keys[0]) not in (Kind.BLOCK, Kind.TAIL):
            return moved
        with self._lock:
            self.values[verb] += moved.num_values
            self.bytes[verb] += moved.num_bytes
        return moved


class TwoStores(Store):
    """Keeps blocks with an even sum of their hash in one store, everything else in another."""

    def __init__(self, even: Store, other: Store) -> None:
        self.label = f"{even.label} and {other.label}"
        self.stores = [other, even]
        self._lifecycle = Lifecycle(self.label)

    @property
    def lease_s(self) -> float:
        return min(store.lease_s for store in self.stores)

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._lifecycle.enter(keys)
        return self._in_runs(keys, lambda store, run, _: store.match(run))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        return self._in_runs(keys, lambda store, run, at: store.get(run, slots.part(*at)))

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        return self._in_runs(keys, lambda store, run, at: store.put(run, slots.part(*at)))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.enter(keys)
        for store, run, _ in self._runs(keys):
            store.remove(run)

    def clear(self, namespace: str) -> None:
        self._lifecycle.check()
        for store in self.stores:
            store.clear(namespace)

    def close(self) -> None:
        if self._lifecycle.end():
            for store in self.stores:
                store.close()

    def transfer(self, context) -> Transfer:
        ways = []
        for store in self.stores:
            own = context.over(StorePart(store, context.call))
            moves = store.optional(MovesValues)
            way = moves.transfer(own) if moves is not None else None
            ways.append(way or context.staged(own, Split(context.range_bytes), None))
        return _TwoWays(self, ways)

    def number_of(self, key: BlockKey) -> int:
        """Returns the index in `stores` of the store that keeps a key."""
        if kind_of(key) not in (Kind.BLOCK, Kind.TAIL):
            return 0
        name = key.partition(":partial:")[0].rpartition(":")[2]
        return 1 - zlib.crc32(name.encode()) % 2

    def _runs(
        self, keys: Sequence[BlockKey]
    ) -> Iterator[tuple[Store, list[BlockKey], tuple[int, int]]]:
        start = 0
        for number, run in groupby(keys, self.number_of):
            run = list(run)
            yield self.stores[number], run, (start, start + len(run))
            start += len(run)

    def _in_runs(self, keys, call) -> int:
        done = 0
        for store, run, at in self._runs(keys):
            try:
                count = count_of(call(store, run, at), run, store)
            except StoreError as error:
                error.num_done += done
                raise
            done += count
            if count < len(run):
                break
        return done


class _BothMemories:
    def __init__(self, ways: Sequence[Transfer]) -> None:
        self._memories = [way.memory for way in ways]
        self.num_bytes = sum(memory.num_bytes for memory in self._memories)

    def ready(self, timeout_s: float) -> None:
        for memory in self._memories:
            memory.ready(timeout_s)

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        return all(memory.is_ready(timeout_s) for memory in self._memories)


class _TwoWays(Transfer):
    """Moves each block in the way of the store that keeps it."""

    def __init__(self, store: TwoStores, ways: Sequence[Transfer]) -> None:
        self.split = ways[0].split
        self.memory = _BothMemories(ways)
        self._store = store
        self._ways = ways

    def slots(self, turn, sizes, least=1):
        return self._ways[0].slots(turn, sizes, least)

    def save(self, turn, moves, on_captured: Callable[[], None]):
        for move in moves:
            for values, way in self._runs(move.values):
                reason = way.save(turn, [move._replace(values=values)], lambda: None)
                if reason is not None:
                    return reason
            on_captured()
        return None

    def load_window(self, turn, move, on_loaded):
        values, way = next(self._runs(move.values))
        shortfall, rest = way.load_window(turn, move._replace(values=values), on_loaded)
        return shortfall, move.values[len(values) - len(rest) :]

    def _runs(self, values):
        start = 0
        for number, run in groupby(values.keys, self._store.number_of):
            stop = start + len(list(run))
            yield values[start:stop], self._ways[number]
            start = stop
