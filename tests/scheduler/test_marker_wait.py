"""MarkerWait: what markers say together, and which are looked for next."""

from __future__ import annotations

import pytest

from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.scheduler.lookup import Lookup
from pdstore.scheduler.marker_wait import MarkerWait, Verdict

NAMESPACE = Namespace({"n": 1}, (Part(0, 0), Part(0, 1)), block_tokens=4, num_shards=2)
KEYS = PromptKeys(NAMESPACE).extend(range(10))
ID = HandoffId("1" * 32)
FIRST, SECOND = (ID.done(NAMESPACE, n) for n in range(2))
STARTED, FAILED = ID.started(NAMESPACE), ID.failed(NAMESPACE)


def wait_of(*, follows: bool = False, num_tokens: int | None = None) -> MarkerWait:
    handoff = Handoff(ID, num_tokens=num_tokens)
    lookup = Lookup(KEYS, handoff, 60.0, lambda match: None, follows=follows)
    return MarkerWait(lookup, handoff, NAMESPACE)


def test_only_the_first_done_is_looked_for_until_it_is_there():
    wait = wait_of()
    assert wait.wanted(with_failed=False) == [FIRST]
    assert wait.take({FIRST}) is None
    assert wait.wanted(with_failed=True) == [SECOND, FAILED]


@pytest.mark.parametrize(
    "looks", [[{FIRST, SECOND}], [{FIRST}, {SECOND}], [{FIRST}, set(), {SECOND}]]
)
def test_all_shards_have_to_be_done(looks):
    wait = wait_of()
    assert [wait.take(found) for found in looks] == [None] * (len(looks) - 1) + [Verdict.DONE]


def test_done_of_all_shards_counts_more_than_a_failure():
    assert wait_of().take({FIRST, SECOND, FAILED}) is Verdict.DONE
    assert wait_of().take({FIRST, FAILED}) is Verdict.FAILED


def test_a_lookup_that_follows_ends_when_p_has_started_or_answered():
    both_at_once = wait_of(follows=True)
    assert both_at_once.wanted(with_failed=False) == [FIRST, STARTED]
    assert both_at_once.take(set()) is None
    assert both_at_once.take({STARTED}) is Verdict.BEGUN
    assert wait_of(follows=True, num_tokens=10).take(set()) is Verdict.BEGUN
    assert wait_of(num_tokens=10).take(set()) is None


def test_a_failure_is_told_to_a_lookup_that_follows():
    assert wait_of(follows=True, num_tokens=10).take({FAILED}) is Verdict.FAILED


def test_news_of_one_shard_lets_it_look_for_the_others_before_it_follows():
    wait = wait_of(follows=True, num_tokens=10)
    assert wait.take({FIRST}) is None
    assert wait.follows_next
    assert wait.take(set()) is Verdict.BEGUN
