"""Lookup: ends once, in time, with the first answer; from any thread."""

from __future__ import annotations

import threading

import pytest

from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.outcome import Reason
from pdstore.scheduler.lookup import Lookup, Match, handed_over

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


def test_of_many_threads_one_ends_the_lookup():
    for _ in range(200):
        counted: list[Match] = []
        lookup, start = lookup_of(counted=counted), threading.Barrier(4)

        def end(lookup=lookup, start=start):
            start.wait(10)
            lookup.finish(Match.miss(KEYS, Reason.FAULT))

        threads = [threading.Thread(target=end) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert counted == [lookup.poll()]


@pytest.mark.parametrize(
    ("num_tokens", "kept"), [(None, 10), (10, 10), (9, 9), (8, 8), (7, 10), (0, 10), (11, 10)]
)
def test_only_tokens_of_the_last_block_are_left_out_for_a_shorter_hand_off(num_tokens, kept):
    handoff = Handoff(HandoffId.new(), num_tokens=num_tokens)
    assert handed_over(KEYS, handoff).num_tokens == kept
    assert KEYS.num_tokens == 10
