"""LookupQueue: every lookup is answered, also beside one that faults or hangs."""

from __future__ import annotations

import threading

import pytest

from pdstore.outcome import Reason
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.lookup_queue import LookupQueue
from tests.scheduler.test_lookup import KEYS
from tests.support.kv import eventually


class Finder:
    """Finds the whole prompt; may raise, or hang until it is released."""

    def __init__(self):
        self.error: BaseException | None = None
        self.released = threading.Event()
        self.released.set()
        self.num_calls = 0

    def __call__(self, keys):
        self.num_calls += 1
        self.released.wait(30)
        if self.error is not None:
            raise self.error
        return Match(keys, keys.num_tokens, None)


@pytest.fixture
def finder():
    finder = Finder()
    yield finder
    finder.released.set()


@pytest.fixture
def queue(finder):
    queue = LookupQueue(finder, patience_s=0.05)
    yield queue
    queue.close()


def added(queue, wait_s=30.0) -> Lookup:
    lookup = Lookup(KEYS, None, wait_s, lambda found: None)
    queue.add(lookup)
    return lookup


def test_each_lookup_is_answered(queue):
    assert [lookup.wait(10).num_tokens for lookup in [added(queue) for _ in range(50)]] == [10] * 50
    assert len(queue) == 0


class Stray(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError("a bug"), Stray("a panic"), SystemExit(1)])
def test_whatever_a_store_raises_is_the_fault_of_one_lookup(queue, finder, error):
    finder.error = error
    assert added(queue).wait(10).reason is Reason.FAULT
    finder.error = None
    assert added(queue).wait(0.9).num_tokens == 10, "and delays no other"


def test_an_answer_that_cannot_be_counted_is_no_store_that_hangs(finder):
    def count(found):
        raise RuntimeError("a bug in the metrics")

    queue, lookup = LookupQueue(finder, patience_s=0.0), Lookup(KEYS, None, 30.0, count)
    queue.add(lookup)
    assert lookup.wait(10).num_tokens == 10
    assert not queue.is_stuck
    queue.close()


def test_a_store_that_hangs_is_noticed_and_the_lookups_end_at_their_deadlines(queue, finder):
    finder.released.clear()
    first, second = added(queue, wait_s=0.02), added(queue, wait_s=0.02)
    assert {first.wait(10).reason, second.wait(10).reason} == {Reason.DEADLINE}
    eventually(lambda: queue.is_stuck)
    finder.released.set()
    eventually(lambda: not queue.is_stuck)
    assert added(queue).wait(10).num_tokens == 10
    assert finder.num_calls == 2, "the one that had ended was not asked for"


def test_close_ends_the_lookups_that_were_not_answered(finder):
    queue = LookupQueue(finder, patience_s=0.05)
    finder.released.clear()
    lookups = [added(queue) for _ in range(3)]
    eventually(lambda: finder.num_calls)
    queue.close()
    assert [lookup.wait(0.0).reason for lookup in lookups[1:]] == [Reason.CLOSED] * 2
