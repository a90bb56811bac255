"""MarkerWait: what markers say together, and which are looked for next."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.scheduler.lookup import Lookup
from pdstore.scheduler.marker_wait import MarkerWait, Verdict
from tests.support.clock import Clock

NAMESPACE = Namespace({"n": 1}, (Part(0, 0), Part(0, 1)), block_tokens=4, num_shards=2)
KEYS = PromptKeys(NAMESPACE).extend(range(10))
ID = HandoffId("1" * 32)
FIRST, SECOND = (ID.done(NAMESPACE, n) for n in range(2))
STARTED, FAILED = ID.started(NAMESPACE), ID.failed(NAMESPACE)


def wait_of(
    *,
    follows: bool = False,
    num_tokens: int | None = None,
    last_save: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> MarkerWait:
    handoff = Handoff(ID, num_tokens=num_tokens, last_save=last_save)
    lookup = Lookup(KEYS, handoff, 60.0, lambda match: None, follows=follows)
    return MarkerWait(lookup, handoff, NAMESPACE, clock=clock)


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


@pytest.mark.parametrize("follows", [True, False])
def test_of_a_p_that_did_not_save_its_last_nothing_is_expected_after_a_moment(follows):
    clock = Clock()
    wait = wait_of(follows=follows, num_tokens=10, last_save="store_full", clock=clock)
    wanted = wait.wanted(with_failed=True)
    assert wanted == [FIRST, STARTED, FAILED]
    clock.now += 1.0
    assert wait.take(set()) is None, "nobody has looked yet"
    assert wait.take(set(), set(wanted)) is None
    clock.now += 0.04
    assert wait.take(set()) is Verdict.FAILED


@pytest.mark.parametrize(("follows", "verdict"), [(True, Verdict.BEGUN), (False, None)])
def test_it_is_waited_for_as_any_other_once_it_has_stored_started(follows, verdict):
    clock = Clock()
    wait = wait_of(follows=follows, num_tokens=10, last_save="store_full", clock=clock)
    assert wait.take({STARTED}, {FIRST, STARTED, FAILED}) is verdict
    assert not wait.is_doubtful
    clock.now += 10.0
    assert wait.take(set()) is verdict
    assert wait.take({FIRST, SECOND}) is Verdict.DONE
