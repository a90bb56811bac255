"""Losses: a load brings less than the pool promised; all say how much and why."""

from __future__ import annotations

import time

import pytest

from pdstore import EngineRequest, HandoffId, JobEnd, Reason
from pdstore.engine.record import record_of
from pdstore.errors import Direction
from pdstore.store.memory import MemoryStore
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import eventually, settings_of

PROMPT, BLOCK = list(range(1, 301)), 64
TABLE, ROOM = list(range(1, 21)), 320
LEASE_S = 1.0


@pytest.fixture
def one(instance):
    """An instance over a store of its own, which has the prompt."""
    one = instance(over=MemoryStore(lease_s=LEASE_S))
    one.pool.save(one.cache.keys(PROMPT), TABLE).wait(20)
    return one


def planned(one, num_ranks=1, num_present=0, params=None):
    """A request of the prompt, and the plan of its load."""
    keys = one.cache.keys(PROMPT)
    request = EngineRequest(one.cache, settings_of(), keys, params, num_ranks=num_ranks)
    eventually(request.poll)
    return request, request.plan_load(request.find(num_present, len(PROMPT)), ROOM)


def report(request, num_tokens, reason=None):
    request.ends.append(JobEnd("", None, Direction.LOAD, num_tokens, reason))


def load(one, request, plan):
    load_on(one, request, plan)
    return request.end_load()


def load_on(one, request, plan):
    request.ends.append(JobEnd.of_job(_done(one.pool.begin_load(plan, TABLE))))


def _done(job):
    job.wait(20)
    return job


def counted(*instances):
    """Promised tokens, those that were loaded, and those that were lost, of both halves of each."""
    return tuple(
        sum(
            half.metrics.registry.get_sample_value("pdstore_tokens_total", {"verb": verb})
            for one in instances
            for half in (one.cache, one.pool)
        )
        for verb in ("promised", "loaded", "lost")
    )


def test_a_whole_load_keeps_the_promise(one):
    request, plan = planned(one, num_present=BLOCK)
    assert load(one, request, plan) == 300
    assert (counted(one), request.loss) == ((300 - BLOCK, 300 - BLOCK, 0), None)
    assert record_of(request, "both").as_json()["loss"] is None


def test_what_any_rank_lacks_is_lost_and_counts_once(one):
    request, _ = planned(one, num_ranks=3, num_present=BLOCK)
    report(request, 300)
    report(request, 128, Reason.CORRUPT)
    report(request, 192, Reason.CORRUPT)
    request.end_load()
    assert counted(one) == (236, 64, 172)
    assert request.loss.words == "172 of 236 promised tokens were not loaded (corrupt)"


def test_what_all_ranks_load_counts_once_as_what_was_promised(instance):
    """vLLM's /metrics adds up what the scheduler and the workers of all ranks count."""
    ranks = [instance(kv_shards=2, rank=(number, 2)) for number in range(2)]
    for one in ranks:
        one.pool.save(one.cache.keys(PROMPT), TABLE).wait(20)
    request, plan = planned(ranks[0], num_ranks=2, num_present=BLOCK)
    for one in ranks:
        load_on(one, request, plan)
    assert request.end_load() == 300
    assert counted(*ranks) == (236, 236, 0)


def test_a_load_that_is_given_up_is_lost_whole_and_its_late_end_does_not_count(one):
    request, _ = planned(one)
    request.give_up(Reason.DEADLINE)
    report(request, 300)
    request.end_load()
    assert counted(one) == (300, 0, 300)


def test_what_is_gone_within_the_lease_is_told_with_its_age(one):
    request, plan = planned(one)
    assert one.cache.clear()
    load(one, request, plan)
    assert counted(one) == (300, 0, 300)
    loss = record_of(request, "both").loss
    assert (loss.num_lost, loss.reason, loss.lease_s) == (300, Reason.LOST, LEASE_S)
    assert 0 <= loss.age_s < LEASE_S
    assert loss.words.endswith(" s after the last lookup, within its lease of 1 s")


def test_what_is_gone_after_the_lease_is_told_with_its_age(one):
    request, plan = planned(one)
    time.sleep(1.1 * LEASE_S)
    assert one.cache.clear()
    load(one, request, plan)
    assert request.loss.age_s > LEASE_S
    assert "after its lease of 1 s" in record_of(request, "both").line()


def test_the_age_is_that_of_the_last_renewal_and_ends_with_the_load(one):
    keys = one.cache.keys(PROMPT)
    request = EngineRequest(one.cache, settings_of(), keys)
    eventually(request.poll)
    time.sleep(1.5 * LEASE_S)
    plan = request.plan_load(request.find(0, len(PROMPT)), ROOM)
    assert one.cache.clear()
    job = _done(one.pool.begin_load(plan, TABLE))
    request.ends.append(JobEnd.of_job(job))
    time.sleep(LEASE_S)  # the engine's step, in which it hears of the load's end
    request.end_load()
    assert request.loss.age_s < LEASE_S


def test_of_a_hand_off_that_p_still_saves_no_age_is_told(one):
    params = {"pdstore": {"attempt": HandoffId.new().hex, "num_tokens": 300}}
    request, plan = planned(one, params=params)
    assert plan.follow is not None
    report(request, BLOCK, Reason.HANDOFF_DEAD)
    request.end_load()
    assert request.loss.words == "236 of 300 promised tokens were not loaded (handoff_dead)"
