"""Fleet: instances that look up and save the prompts of a trace, by the trace's own clock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.trace.requests import TRACE_BLOCK, TraceRequest
from pdstore.errors import StoreFull
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import Layout
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import read_settings
from pdstore.store.base import Slots, Store
from pdstore.store.memory import MemoryStore


class Clock:
    """The trace's time, which jumps from request to request."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Hits:
    """The tokens of the prompts so far, and those that the pool had."""

    num_tokens: int = 0
    num_found: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.num_found / max(1, self.num_tokens)


class Fleet:
    """Instances with a store each, or with one pool; each request goes to one at random.

    Values are one byte a token, so that a budget in bytes is one in tokens.

    tokens: room of each instance; None: no bound. A shared pool has all of it together.
    is_shared: all instances use one pool.
    lag_s: from a request until its prompt is stored.
    """

    def __init__(
        self, clock: Clock, num_instances: int, tokens: int | None, *, is_shared: bool, lag_s: float
    ) -> None:
        self._clock, self._lag_s = clock, lag_s
        self._chance = random.Random(0)
        room = tokens and tokens * (num_instances if is_shared else 1)
        num_stores = 1 if is_shared else num_instances
        self._stores: list[Store] = [
            MemoryStore(budget=room, clock=clock) for _ in range(num_stores)
        ]
        settings = read_settings(
            store="memory://", block_tokens=TRACE_BLOCK, layer_ranges=1, kv_shards=1
        )
        layout = Layout.of(
            settings,
            dtype="uint8",
            layers=[LayerSpec(num_kv_heads=1, head_dim=1)],
            engine_block_tokens=TRACE_BLOCK,
            rope="",
        )
        namespace = layout.namespace(settings, weights="trace")
        self._instances = [
            PrefixCacheManager(settings, namespace, store=self._stores[i % num_stores])
            for i in range(num_instances)
        ]
        self._parts = namespace.parts
        self._saves: deque[tuple[float, Store, PromptKeys]] = deque()
        self._buffer = memoryview(bytearray(TRACE_BLOCK))
        self.hits = Hits()
        self.num_refused = 0  # saves for which everything else was leased

    def keys(self, tokens: Sequence[int]) -> PromptKeys:
        """Returns the names of a prompt's blocks, the same on every instance."""
        return self._instances[0].keys(tokens)

    def ask(self, keys: PromptKeys) -> None:
        """Makes one request now: looks up what is stored, then saves the prompt."""
        self._save_until(self._clock())
        chosen = self._chance.randrange(len(self._instances))
        self.hits.num_tokens += keys.num_tokens
        self.hits.num_found += self._instances[chosen].match(keys).num_tokens
        store = self._stores[chosen % len(self._stores)]
        self._saves.append((self._clock() + self._lag_s, store, keys))
        self._save_until(self._clock())

    def close(self) -> None:
        for instance in self._instances:
            instance.close()
        for store in self._stores:
            store.close()

    def _save_until(self, now_s: float) -> None:
        while self._saves and self._saves[0][0] <= now_s:
            _, store, keys = self._saves.popleft()
            names = keys.store_keys(self._parts)
            sizes = [keys.tokens_of(i) for i in range(len(names))]
            try:
                store.put(names, Slots(self._buffer, TRACE_BLOCK, [0] * len(names), sizes))
            except StoreFull:
                self.num_refused += 1


def replay(requests: Iterable[TraceRequest], fleets: Sequence[Fleet], clock: Clock) -> int:
    """Asks every fleet the same requests at the same times. Returns how many there were."""
    count = 0
    for request in requests:
        count += 1
        clock.now_s = request.at_s
        keys = fleets[0].keys(request.token_ids)
        for fleet in fleets:
            fleet.ask(keys)
    return count
