"""The orders in which vLLM may not call: the request bypasses the pool, and no other one does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore.adapters.vllm.messages import StepReport
from pdstore.engine.job_end import JobEnd
from pdstore.engine.request import EngineRequest
from pdstore.errors import Direction, IllegalCall
from pdstore.format.handoff import Handoff, HandoffId
from tests.adapters.vllm.standins import vllm_request
from tests.adapters.vllm.test_walk import IDS, PROMPT, Engine
from tests.support.kv import eventually

BLOCKS = SimpleNamespace(get_block_ids=lambda: (list(IDS),))


@pytest.fixture
def engine_of(tmp_path, closed_after):
    return lambda role: closed_after(Engine(f"shm://p?size=8MiB&dir={tmp_path}", role))


def arrive(side, request_id="r", params=None):
    request = vllm_request(PROMPT, request_id=request_id, kv_transfer_params=params)
    side.on_new_request(request)
    return request


def found(side, request):
    def answer():
        num_tokens, _ = side.get_num_new_matched_tokens(request, 0)
        return None if num_tokens is None else [num_tokens]

    return eventually(answer)[0]


def step(side, *requests):
    """The metadata of a step that computes the prompts of these requests."""
    output = SimpleNamespace(
        num_scheduled_tokens={request.request_id: len(PROMPT) for request in requests},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda request_id: (list(IDS),)),
    )
    return side.build_connector_meta(output)


def bypasses(caplog):
    return [record.getMessage() for record in caplog.records if "illegal call" in record.msg]


def stored(engine):
    """Stores the prompt in the pool; returns the parameters of P's answer."""
    request = arrive(engine.scheduler)
    found(engine.scheduler, request)
    engine.worker.bind_connector_metadata(step(engine.scheduler, request))
    engine.worker.start_load_kv(None)
    engine.worker.wait_for_save()
    engine.worker.worker.pool.flush(20)
    return engine.scheduler.request_finished(request, IDS)[1]


def test_a_request_that_is_computed_without_a_question_bypasses_the_pool_alone(engine_of, caplog):
    side, handoff = engine_of("prefill").scheduler, HandoffId.new()
    unasked, asked = arrive(side, "unasked", Handoff(handoff).params()), arrive(side, "asked")
    found(side, asked)
    assert [save.request_id for save in step(side, unasked, asked).saves] == ["asked"]
    metadata = step(side, unasked)
    assert [each.hex for each in metadata.aborted_handoffs] == [handoff.hex], "D need not wait"
    assert metadata.saves == []
    assert found(side, unasked) == 0
    assert bypasses(caplog) == ["request unasked bypasses the pool after an illegal call"]
    assert side.metrics.pop().data["misses|fault"] == 1
    assert side.request_finished(unasked, IDS) == (False, None)
    again = arrive(side, "unasked")
    found(side, again)
    assert [save.request_id for save in step(side, again).saves] == ["unasked"]


def test_a_load_goes_on_although_its_request_bypasses_the_pool(engine_of, caplog):
    params, side = stored(engine_of("prefill")), engine_of("decode").scheduler
    request = arrive(side, params=params)
    side.update_state_after_alloc(request, BLOCKS, found(side, request))
    [spec] = step(side).loads
    assert spec.plan.num_tokens == len(PROMPT)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False), "it loads already"
    assert bypasses(caplog) == ["request r bypasses the pool after an illegal call"]
    assert side.has_pending_push_work(), "its record waits for the load"
    report = StepReport(ended=[JobEnd("r", None, Direction.LOAD, len(PROMPT), None)])
    side.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert not side.has_pending_push_work()
    assert step(side, request).saves == []
    assert side.request_finished(request, IDS) == (False, None)


def test_vllm_is_told_of_the_end_of_a_load_that_nothing_offered(engine_of, caplog):
    side = engine_of("decode").scheduler
    request = arrive(side, params=Handoff(HandoffId.new()).params())
    side.update_state_after_alloc(request, BLOCKS, len(PROMPT))
    [spec] = step(side).loads
    assert (spec.request_id, spec.plan) == ("r", None)
    assert bypasses(caplog) == ["request r bypasses the pool after an illegal call"]


def test_a_request_may_end_before_vllm_asks_about_it(engine_of, caplog):
    side, handoff = engine_of("prefill").scheduler, HandoffId.new()
    request = arrive(side, params=Handoff(handoff).params())
    assert side.request_finished(request, ()) == (False, None)
    assert [each.hex for each in step(side).aborted_handoffs] == [handoff.hex]
    assert caplog.text.count("bypasses") == 0


def test_a_call_that_is_refused_at_the_end_of_a_request_is_told_once(
    engine_of, caplog, monkeypatch
):
    def refuse(state):
        raise IllegalCall("end_prompt is not legal", state.id)

    side = engine_of("prefill").scheduler
    request = arrive(side)
    found(side, request)
    request.num_output_tokens = 1
    with monkeypatch.context() as patch:
        patch.setattr(EngineRequest, "end_prompt", refuse)
        assert side.request_finished(request, IDS) == (False, None)
    assert bypasses(caplog) == ["request r bypasses the pool after an illegal call"]
    assert side.metrics.pop().data["misses|fault"] == 1
    again = arrive(side)
    found(side, again)
    assert [save.request_id for save in step(side, again).saves] == ["r"], "it is a new request"
