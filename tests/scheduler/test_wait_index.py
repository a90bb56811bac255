"""WaitIndex: keys lead to the waits that want them, however often these change their wishes."""

from __future__ import annotations

import pytest

from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.scheduler.lookup import Lookup
from pdstore.scheduler.marker_wait import MarkerWait
from pdstore.scheduler.wait_index import WaitIndex

NAMESPACE = Namespace({"n": 1}, (Part(0, 0), Part(0, 1)), block_tokens=4, num_shards=2)
ONE, OTHER = (HandoffId(digit * 32) for digit in "12")


def wait_for(handoff: HandoffId) -> MarkerWait:
    lookup = Lookup(PromptKeys(NAMESPACE), Handoff(handoff), 60.0, lambda match: None)
    return MarkerWait(lookup, Handoff(handoff), NAMESPACE)


@pytest.fixture
def index():
    return WaitIndex()


def test_news_leads_to_the_waits_that_want_it(index):
    first, second, third = (wait_for(handoff) for handoff in (ONE, ONE, OTHER))
    for wait in (first, second, third):
        index.add(wait)
    assert index.about({ONE.done(NAMESPACE, 0)}) == [first, second]
    assert index.about([OTHER.failed(NAMESPACE), OTHER.done(NAMESPACE, 0)]) == [third]
    assert index.about({ONE.done(NAMESPACE, 1), "another"}) == []


def test_each_key_is_wanted_once(index):
    for handoff in (ONE, ONE, OTHER):
        index.add(wait_for(handoff))
    done, failed = ([key(h) for h in (ONE, OTHER)] for key in (_done, _failed))
    assert index.wanted(with_failed=False) == done
    assert index.wanted(with_failed=True) == done + failed


def test_a_wait_that_wants_another_key_is_found_by_that_one(index):
    wait = wait_for(ONE)
    index.add(wait)
    wait.take({ONE.done(NAMESPACE, 0)})
    index.renew(wait)
    assert index.wanted(with_failed=False) == [ONE.done(NAMESPACE, 1)]
    assert index.about({ONE.done(NAMESPACE, 0)}) == []
    assert index.about({ONE.done(NAMESPACE, 1)}) == [wait]


def test_what_is_removed_leaves_nothing_and_twice_is_fine(index):
    first, second = wait_for(ONE), wait_for(ONE)
    index.add(first)
    index.add(second)
    index.remove(first)
    index.remove(first)
    assert (list(index), len(index)) == ([second], 1)
    index.remove(second)
    assert index.wanted(with_failed=True) == []


def test_a_wait_may_be_removed_while_all_are_looked_at(index):
    for handoff in (ONE, OTHER):
        index.add(wait_for(handoff))
    for wait in index:
        index.remove(wait)
    assert len(index) == 0


def _done(handoff: HandoffId) -> str:
    return handoff.done(NAMESPACE, 0)


def _failed(handoff: HandoffId) -> str:
    return handoff.failed(NAMESPACE)
