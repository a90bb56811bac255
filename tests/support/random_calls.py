"""play_random_calls: random calls against a store and a dict, which must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pdstore.errors import WrongLength
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.testing.values import content, empty_slots, filled_slots, fresh_keys

_NUM_BLOCKS = 10
_SIZES = (1, 64, 4096, 70_000)

# a sorted batch mostly meets what is stored, an unsorted one mostly a gap
numbers = strategies.lists(strategies.integers(0, _NUM_BLOCKS + 3), unique=True, max_size=8)
batches = numbers | numbers.map(sorted)
sizes = strategies.sampled_from(_SIZES)


PLAY = hypothesis.settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def play_random_calls(
    open_store: Callable[[], Store], settings: hypothesis.settings = PLAY
) -> None:
    """Plays random match, get, put and remove. Raises at the first answer that a dict would not
    give, with the shortest calls that lead there.

    `open_store` opens a store for each example; a pool that others use too is fine.
    """
    run_state_machine_as_test(
        lambda: StoreMachine(open_store()),  # type: ignore[arg-type]  # a function may stand here
        settings=settings,
    )


class StoreMachine(RuleBasedStateMachine):
    """A store that is large enough to evict nothing, and what must be in it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        blocks = fresh_keys(_NUM_BLOCKS)
        tails = [BlockKey(f"{blocks[-1]}:partial:{n}") for n in (1, 10, 11)]
        marker = BlockKey(blocks[0].replace(":0:0:", ":handoff:") + ":0:done")
        self.keys = [*blocks, *tails, marker]
        self.expected: dict[BlockKey, bytes] = {}
        self.store = store

    def teardown(self) -> None:
        self.store.remove(self.keys)
        self.store.close()

    @rule(batch=batches, size=sizes, version=strategies.integers(0, 2))
    def put(self, batch: Sequence[int], size: int, version: int) -> None:
        keys = [self.keys[i] for i in batch]
        values = [content(key, size, version) for key in keys]
        assert self.store.put(keys, filled_slots(values)) == len(keys)
        for key, value in zip(keys, values, strict=True):
            self.expected.setdefault(key, value)

    @rule(batch=batches)
    def match(self, batch: Sequence[int]) -> None:
        keys = [self.keys[i] for i in batch]
        assert self.store.match(keys) == self._num_stored(keys)

    @rule(batch=batches)
    def get(self, batch: Sequence[int]) -> None:
        keys = [self.keys[i] for i in batch]
        slots = empty_slots([len(self.expected.get(key, b"x")) for key in keys])
        n = self.store.get(keys, slots)
        assert n == self._num_stored(keys)
        for i, key in enumerate(keys[:n]):
            assert slots.value(i) == self.expected[key]

    @rule(batch=batches, size=sizes)
    def get_of_one_size(self, batch: Sequence[int], size: int) -> None:
        keys = [self.keys[i] for i in batch]
        lengths = [len(self.expected[key]) for key in keys[: self._num_stored(keys)]]
        wrong = next((i for i, length in enumerate(lengths) if length != size), None)
        try:
            n = self.store.get(keys, empty_slots([size] * len(keys)))
        except WrongLength as error:
            assert error.num_done == wrong  # noqa: PT017 - hypothesis chooses which way it goes
        else:
            assert (n, wrong) == (len(lengths), None)

    @rule(batch=batches)
    def remove(self, batch: Sequence[int]) -> None:
        keys = [self.keys[i] for i in batch]
        self.store.remove(keys)
        for key in keys:
            self.expected.pop(key, None)

    @invariant()
    def matches_all_that_is_stored(self) -> None:
        assert self.store.match(list(self.expected)) == len(self.expected)

    def _num_stored(self, keys: Sequence[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.expected), len(keys))
