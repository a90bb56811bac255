"""A request in vLLM's queue: each time vLLM asks, it gets what the pool has then."""

from __future__ import annotations

import pytest

from pdstore import open_store
from pdstore.adapters.vllm.messages import StepReport
from pdstore.engine.job_end import JobEnd
from pdstore.errors import Direction, Reason
from tests.adapters.vllm.scheduler_kit import BLOCK, PROMPT, TABLE, found, idle_step, step
from tests.adapters.vllm.scheduler_kit import scheduler_of as scheduler_of
from tests.adapters.vllm.standins import vllm_request
from tests.support.instances import num_renewed as num_renewed
from tests.support.kv import Instance, eventually, settings_of


@pytest.fixture
def url(tmp_path):
    """A pool whose leases are short, so that answers are renewed soon."""
    return f"file://{tmp_path}/pool?lease=0.6"


@pytest.fixture
def other(url, closed_after):
    """Another instance of the pool."""
    store = closed_after(open_store(url, settings_of(store=url)))
    return closed_after(Instance(store, engine_block_tokens=BLOCK, weights="w"))


def saved(other):
    assert other.pool.save(other.cache.keys(PROMPT), TABLE).wait(20).num_tokens == len(PROMPT)


def arrived(scheduler, params=None):
    asked = vllm_request(PROMPT, kv_transfer_params=params, request_id="r")
    scheduler.add(asked)
    return asked


def loaded(num_tokens=300, reason=None):
    return StepReport(ended=[JobEnd("r", None, Direction.LOAD, num_tokens, reason)])


def test_what_others_save_while_a_request_waits_is_loaded(num_renewed, scheduler_of, other):
    scheduler = scheduler_of()
    asked = arrived(scheduler)
    assert found(scheduler, asked) == 0
    saved(other)
    eventually(lambda: found(scheduler, asked) == 300)
    scheduler.load(asked, [TABLE], 300)
    [spec] = idle_step(scheduler).loads
    assert spec.plan.num_tokens == 300
    eventually(lambda: num_renewed() == 0)


def test_what_went_while_a_request_waits_is_computed_and_saved(num_renewed, scheduler_of, other):
    saved(other)
    scheduler = scheduler_of()
    asked = arrived(scheduler)
    assert found(scheduler, asked) == 300
    assert other.cache.clear()
    eventually(lambda: found(scheduler, asked) == 0)
    [save] = step(scheduler, asked, 300).saves
    assert (save.plan.first_token, save.plan.keys.num_tokens) == (0, 256)
    eventually(lambda: num_renewed() == 0)


def test_a_preempted_request_gets_what_the_pool_has_then(num_renewed, scheduler_of, other):
    saved(other)
    scheduler = scheduler_of()
    asked = arrived(scheduler)
    scheduler.load(asked, [TABLE], found(scheduler, asked))
    scheduler.report(loaded())
    asked.num_computed_tokens = 299
    step(scheduler, asked, 1)
    asked.num_computed_tokens, asked.num_output_tokens = 0, 1
    assert other.cache.clear()
    assert found(scheduler, asked) == 0
    step(scheduler, asked, 300)
    eventually(lambda: num_renewed() == 0)
    text = scheduler.metrics.registry
    assert text.get_sample_value("pdstore_tokens_total", {"verb": "requested"}) == 300


def test_a_hand_off_that_is_mended_while_its_request_waits_does_not_fail_it(scheduler_of, other):
    params = {"pdstore": {"attempt": "f" * 32, "num_tokens": 300, "last_save": "store_full"}}
    scheduler = scheduler_of(on_miss="fail", may_follow=False, handoff_wait_s=0.1)
    asked = arrived(scheduler, params)
    assert found(scheduler, asked) == 299, "promised, so that the load fails the request"
    saved(other)
    eventually(lambda: found(scheduler, asked) == 300)
    scheduler.load(asked, [TABLE], 300)
    assert idle_step(scheduler).loads[0].plan is not None


def test_a_request_that_was_aborted_in_the_queue_is_renewed_no_more(num_renewed, scheduler_of):
    scheduler = scheduler_of()
    asked = arrived(scheduler)
    eventually(lambda: num_renewed() == 1)
    scheduler.finish_request(asked)
    eventually(lambda: num_renewed() == 0)
    misses = scheduler.metrics.registry.get_sample_value(
        "pdstore_misses_total", {"reason": Reason.ABSENT.value}
    )
    assert misses == 1


def test_a_request_whose_end_raises_is_renewed_no_more(num_renewed, scheduler_of, monkeypatch):
    scheduler = scheduler_of()
    asked = arrived(scheduler)
    step(scheduler, asked, 300)
    asked.num_computed_tokens, asked.num_output_tokens = 0, 1  # it was preempted
    found(scheduler, asked)
    eventually(lambda: num_renewed() == 1)
    monkeypatch.setattr(scheduler.saves, "plan_answer", None)
    with pytest.raises(TypeError):
        scheduler.finish_request(asked)
    eventually(lambda: num_renewed() == 0)
