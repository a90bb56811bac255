"""Lookups, and how much of a prompt the pool has."""

from __future__ import annotations

import pytest

from pdstore.errors import Reason, StoreError, StoreUnavailable
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import Namespace, Part, PromptKeys
from pdstore.scheduler.lookup import Lookup, Match, find, handed_over
from pdstore.scheduler.usable import num_usable
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from tests.support.scripted_store import Scripted

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
KEYS = PromptKeys(NAMESPACE).extend(range(10))


def lookup_of(wait_s=30.0, handoff=None, counted=None) -> Lookup:
    return Lookup(KEYS, handoff, wait_s, (counted if counted is not None else []).append)


def test_the_first_answer_counts_and_is_counted_once():
    counted = []
    lookup = lookup_of(counted=counted)
    assert lookup.poll() is None
    first = Match(KEYS, 10, None)
    lookup.finish(first)
    lookup.finish(Match.miss(KEYS, Reason.ABSENT))
    lookup.cancel()
    assert lookup.poll() is lookup.wait(0.0) is first
    assert counted == [first]


@pytest.mark.parametrize(
    ("num_tokens", "kept"), [(None, 10), (10, 10), (9, 9), (8, 8), (7, 10), (0, 10), (11, 10)]
)
def test_only_tokens_of_the_last_block_are_left_out_for_a_shorter_hand_off(num_tokens, kept):
    handoff = Handoff(HandoffId.new(), num_tokens=num_tokens)
    assert handed_over(KEYS, handoff).num_tokens == kept
    assert KEYS.num_tokens == 10


FULL = Namespace({"n": 1}, (Part(0, 0), Part(0, 1)), block_tokens=4, num_shards=2)
MIXED = Namespace({"n": 2}, (Part(0, 0), Part(1, 0)), block_tokens=4, needs={1: 6})
SLIDING = Namespace({"n": 3}, (Part(0, 0),), block_tokens=4, needs={0: 6})


def keys_of(namespace, num_tokens=38) -> PromptKeys:
    return PromptKeys(namespace).extend(range(num_tokens))


def store_with(keys: PromptKeys, without=()) -> MemoryStore:
    """A store with all of a prompt but the (block, part) pairs in `without`."""
    parts, store = keys.namespace.parts, MemoryStore()
    names = [key for key in keys.store_keys(parts)]
    for block, part in without:
        names.remove(keys.store_keys([parts[part]])[block])
    n = len(names)
    store.put(names, Slots(memoryview(bytearray(8)), 8, [0] * n, [8] * n))
    return store


@pytest.mark.parametrize("namespace", [FULL, MIXED, SLIDING])
def test_a_whole_prompt_is_found_with_its_tail(namespace):
    keys = keys_of(namespace)
    found = find(store_with(keys), keys)
    assert (found.num_tokens, found.reason, len(found.keys)) == (38, None, 10)


@pytest.mark.parametrize("part", [0, 1])
def test_a_block_with_a_missing_part_ends_the_match(part):
    keys = keys_of(FULL)
    assert num_usable(store_with(keys, [(3, part)]), keys) == 3


def test_a_gap_in_the_window_ends_the_prompt_before_it():
    keys = keys_of(MIXED)
    assert num_usable(store_with(keys, [(8, 1)]), keys) == 8


def test_a_full_group_ends_the_prompt_and_the_window_moves_with_the_end():
    keys = keys_of(MIXED)
    gaps = [(6, 0), *((b, 1) for b in (0, 1, 2, 3, 7, 8, 9))]
    assert num_usable(store_with(keys, gaps), keys) == 6


def test_gaps_in_ever_earlier_windows_are_followed_a_few_times_then_a_prefix_counts():
    keys = keys_of(SLIDING, 400)
    odd = [(b, 0) for b in range(1, 100, 2)]
    assert num_usable(store_with(keys, odd), keys) == 1


class Answering(WrapperStore):
    """Answers every match alike."""

    def __init__(self, answer):
        super().__init__(MemoryStore())
        self.answer = answer

    def match(self, keys):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [-1, -40, 1000, None, 3.0, True, "3"])
@pytest.mark.parametrize("namespace", [FULL, MIXED, SLIDING])
def test_an_impossible_count_is_an_error_of_the_store(namespace, answer):
    with pytest.raises(StoreError, match="answered"):
        num_usable(Answering(answer), keys_of(namespace))
    found = find(Answering(answer), keys_of(namespace))
    assert (found.num_tokens, found.reason) == (0, Reason.STORE_ERROR)


class FailingAfter(WrapperStore):
    """Fails at the first of some keys, and says how many of a call came before it."""

    def __init__(self, store, *bad):
        super().__init__(store)
        self.bad = bad

    def match(self, keys):
        n = next((n for n, key in enumerate(keys) if key in self.bad), None)
        if n is not None and super().match(keys[:n]) == n:
            raise StoreUnavailable("away", num_done=n)
        return super().match(keys)


@pytest.mark.parametrize(
    ("namespace", "part", "block", "kept"),
    [(FULL, 1, 3, 3), (FULL, 0, 0, 0), (MIXED, 0, 5, 5), (MIXED, 0, 0, 0), (SLIDING, 0, 9, 0)],
)
def test_a_lookup_counts_the_blocks_before_an_error(namespace, part, block, kept):
    keys = keys_of(namespace)
    bad = keys.store_keys([namespace.parts[part]])[block]
    found = find(FailingAfter(store_with(keys), bad), keys)
    assert len(found.keys) == kept
    assert found.num_tokens == kept * namespace.block_tokens
    assert found.reason is Reason.STORE_DOWN
    assert type(found.error) is StoreUnavailable


def test_an_error_that_claims_more_keys_than_there_are_counts_none():
    error = StoreUnavailable("away", num_done=10_000)
    found = find(Scripted(2, error), keys_of(FULL))
    assert (found.num_tokens, found.reason) == (0, Reason.STORE_DOWN)
