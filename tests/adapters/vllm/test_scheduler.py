"""PDStoreConnectorScheduler on a real pool, with requests and blocks as vLLM hands them over."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from pdstore import open_store
from pdstore.adapters.vllm.messages import (
    RankWeights,
    StepReport,
)
from pdstore.engine.job_end import JobEnd
from pdstore.errors import Direction, Reason
from pdstore.format.handoff import Handoff, HandoffId
from tests.adapters.vllm.scheduler_kit import BLOCK, PROMPT, TABLE, found, idle_step, step
from tests.adapters.vllm.scheduler_kit import scheduler_of as scheduler_of
from tests.adapters.vllm.scheduler_kit import url as url
from tests.adapters.vllm.standins import picture, vllm_request
from tests.support.kv import Instance, parsed_handoffs, settings_of


@pytest.fixture
def saved(url):
    """The prompt, saved in the pool."""
    store = open_store(url, settings_of(store=url))
    instance = Instance(store, engine_block_tokens=BLOCK, weights="w")
    keys = instance.cache.keys(PROMPT)
    assert instance.pool.save(keys, TABLE).wait(20).num_tokens == len(PROMPT)
    instance.close()
    store.close()


def request(params=None, request_id="r"):
    return vllm_request(PROMPT, kv_transfer_params=params, request_id=request_id)


def loaded(request_id="r", num_tokens=300, reason=None):
    """The report of a load that has ended."""
    return StepReport(ended=[JobEnd(request_id, None, Direction.LOAD, num_tokens, reason)])


def saved_with(save, reason):
    """The report of a save that has ended."""
    return StepReport(ended=[JobEnd(save.request_id, 0, Direction.SAVE, 0, reason)])


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TOKENS` that no prompt fills")
def test_blocks_that_no_prompt_of_the_model_fills_are_told_at_the_start(scheduler_of, caplog):
    scheduler_of(longest_prompt=32)
    assert f"PDSTORE_BLOCK_TOKENS={settings_of().block_tokens}, and no prompt has over 32" in (
        caplog.text
    )


@pytest.mark.usefixtures("saved")
def test_a_stored_prompt_is_found_and_its_load_is_queued_once(scheduler_of):
    scheduler, asked = scheduler_of(step_timeout_s=30.0), request()
    scheduler.add(asked)  # vLLM shows a request before it asks about it
    assert scheduler.num_found(asked, 0) == len(PROMPT), "the first answer is waited for"
    assert found(scheduler, asked, num_computed=2 * BLOCK) == len(PROMPT) - 2 * BLOCK
    scheduler.load(asked, [TABLE], len(PROMPT) - 2 * BLOCK)
    [spec] = idle_step(scheduler).loads
    plan = spec.plan
    assert (plan.first_token, plan.num_tokens, plan.follow) == (2 * BLOCK, len(PROMPT), None)
    assert list(spec.block_ids[0]) == TABLE
    assert idle_step(scheduler).loads == []


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("reason", [None, Reason.LOST])
def test_what_was_loaded_is_not_saved_and_what_failed_not_loaded_again(scheduler_of, reason):
    scheduler, asked = scheduler_of(), request()
    num_loaded = len(PROMPT) if reason is None else BLOCK
    scheduler.load(asked, [TABLE], found(scheduler, asked))
    scheduler.report(loaded(reason=reason, num_tokens=num_loaded))
    if reason is not None:
        assert scheduler.num_found(asked, 0) == 0
    asked.num_computed_tokens = num_loaded
    saves = step(scheduler, asked, len(PROMPT) - num_loaded).saves
    assert [save.plan.first_token for save in saves] == ([] if reason is None else [BLOCK])


def test_ps_answer_names_the_hand_off_that_its_last_chunk_publishes(scheduler_of):
    p, asked = scheduler_of(role="prefill"), request()
    p.add(asked)
    assert [save.plan.handoff for save in step(p, asked, 256).saves] == [None]
    metadata = step(p, asked, 44)
    said = Handoff.of(p.finish_request(asked))
    assert [save.plan.handoff for save in metadata.saves] == [said.id]
    assert said.num_tokens == len(PROMPT)
    assert metadata.saves[0].plan.announce is None, (
        "nobody waits for the start of a relayed hand-off"
    )


def test_d_follows_a_hand_off_from_ps_answer_on_where_a_short_load_fails_no_request(scheduler_of):
    p, asked = scheduler_of(role="prefill"), request()
    p.add(asked)
    step(p, asked, 300)
    theirs = request(p.finish_request(asked))
    d = scheduler_of(role="decode")
    d.load(theirs, [TABLE], found(d, theirs))
    [spec] = idle_step(d).loads
    assert spec.plan.follow == Handoff.of(theirs.kv_transfer_params).id
    strict = scheduler_of(role="decode", may_follow=False, handoff_wait_s=0.5)
    assert strict.num_found(theirs, 0) is None
    assert found(strict, theirs) == 0, "nothing was stored in time"


def test_the_log_says_why_requests_bypass_the_pool_once_a_minute(scheduler_of, caplog):
    caplog.set_level("INFO")
    scheduler = scheduler_of()
    for name in ("r", "s"):
        asked = vllm_request(PROMPT, request_id=name, resumable=True)
        assert scheduler.num_found(asked, 0) == 0
    assert caplog.text.count("bypasses the pool") == 1
    assert "request r bypasses the pool: its prompt comes in parts" in caplog.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kv_transfer_params_are_parsed_once_a_request(scheduler_of, monkeypatch, role):
    asked, scheduler = request(Handoff(HandoffId.new()).params()), scheduler_of(role=role)
    parsed = parsed_handoffs(monkeypatch)
    for _ in range(2):
        assert scheduler.add(asked) is not None
    scheduler.finish_request(asked)
    assert parsed == [asked.kv_transfer_params]


def test_a_d_that_was_asked_with_p_is_told_of_the_start_once_and_of_an_abort(scheduler_of):
    handoff = HandoffId.new()
    p, asked = scheduler_of(role="prefill"), request(Handoff(handoff).params())
    p.add(asked)
    started, num_tokens = step(p, asked, 128).saves[0].plan.announce
    assert (started.hex, num_tokens) == (handoff.hex, len(PROMPT))
    assert step(p, asked, 128).saves[0].plan.announce is None
    assert p.finish_request(asked) is None
    assert p.is_at_work
    assert [each.hex for each in idle_step(p).aborted_handoffs] == [handoff.hex]


def test_blocks_are_held_as_long_as_a_save_reads_them_and_not_until_it_has_ended(scheduler_of):
    """vLLM preempts nobody while it is told that blocks come back."""
    both, asked = scheduler_of(), request()
    both.add(asked)
    [save] = step(both, asked, 300).saves
    both.finish_request(asked)
    assert both.saves
    both.report(StepReport(released=Counter({save.number: 1})))
    assert not both.saves
    assert both.is_at_work, "the save's end comes with a step"


def test_a_step_with_a_sequence_too_long_for_the_draft_model_computes_no_draft(scheduler_of):
    """vLLM then skips the draft model for all sequences of the step, also for those of others."""
    both, asked = scheduler_of(longest_drafted=310), request()
    both.add(asked)
    drafts_from = []
    for beside in (309, 310, 0):
        [save] = step(both, asked, 64, beside=beside).saves
        drafts_from.append(save.plan.drafts_from)
    assert drafts_from == [0, 128, 128]
    step(both, asked, 108)
    asked.num_output_tokens, asked.num_tokens = 1, 400
    asked.all_token_ids = list(range(1, 401))
    step(both, asked, 10)  # up to 310 tokens: it is settled from here on
    step(both, asked, 20)
    both.finish_request(asked, (TABLE,))
    [answer] = idle_step(both).saves
    assert (answer.plan.keys.num_tokens, answer.plan.drafts_from) == (320, 330)


@pytest.mark.parametrize(("num_tokens", "ends"), [(320, []), (321, [320])])
def test_an_answer_is_saved_at_its_end_up_to_the_last_token_with_kv(scheduler_of, num_tokens, ends):
    both, asked = scheduler_of(), request()
    both.add(asked)
    step(both, asked, 300)
    asked.num_tokens, asked.num_output_tokens = num_tokens, num_tokens - 300
    asked.num_computed_tokens = 330  # a draft may be taken back
    asked.all_token_ids = list(range(1, num_tokens + 1))
    assert step(both, asked, 1).saves == []
    both.finish_request(asked, (TABLE,))
    saved = [(s.plan.keys.num_tokens, [*s.block_ids[0]]) for s in idle_step(both).saves]
    assert saved == [(end, TABLE) for end in ends]


def test_what_a_preempted_request_loads_in_vain_is_saved_again(saved, scheduler_of):
    both, asked = scheduler_of(), request()
    both.load(asked, [TABLE], found(both, asked))
    both.report(loaded())
    asked.num_output_tokens = 1
    assert [step(both, asked, 300).saves, step(both, asked, 1).saves] == [[], []]
    asked.num_computed_tokens = 0  # preempted
    both.load(asked, [TABLE], found(both, asked))
    both.report(loaded(num_tokens=64, reason=Reason.ABSENT))
    asked.num_computed_tokens = 64
    assert [save.plan.first_token for save in step(both, asked, 236).saves] == [64]


def test_a_hand_off_that_must_not_be_computed_and_falls_short_fails_as_a_load(scheduler_of):
    strict = {"role": "decode", "on_miss": "fail", "may_follow": False, "handoff_wait_s": 0.05}
    d, theirs = scheduler_of(**strict), request(Handoff(HandoffId.new()).params())
    num_found = found(d, theirs)
    assert num_found == len(PROMPT) - 1
    d.load(theirs, [TABLE], num_found)
    [spec] = idle_step(d).loads
    assert spec.plan is None
    assert found(scheduler_of(**strict), request()) == 0, "nobody handed that one over"
    assert scheduler_of(step_timeout_s=9.0).num_found(theirs, 0) is None, "P may begin much later"


def test_p_says_in_its_answers_that_its_last_save_fell_short(scheduler_of):
    p, numbers = scheduler_of(role="prefill"), itertools.count()

    def told(reason):
        asked = request(request_id=f"r{next(numbers)}")
        p.add(asked)
        [save] = step(p, asked, len(PROMPT)).saves
        answer = p.finish_request(asked)["pdstore"]
        p.report(saved_with(save, reason))
        assert save.plan.handoff.last_save_failed == ("last_save" in answer)
        return answer.get("last_save")

    assert told(Reason.STORE_FULL) is None
    assert told(None) == "store_full"
    assert told(None) is None


def written(*, since, generation=1, digest=b"n" * 16):
    """The report of a rank whose weights were written before step `since`."""
    return StepReport(weights={0: RankWeights(generation, digest, since)})


def test_after_a_write_what_has_begun_leaves_the_pool_and_what_waits_gets_new_keys(scheduler_of):
    p, asked, waiting = scheduler_of(role="prefill"), request(), request(request_id="waits")
    p.add(asked)
    before = p.add(waiting).keys.hash_of(0)
    assert step(p, asked, 128).saves
    p.report(written(since=1))
    assert step(p, asked, 172).saves == []
    assert p.finish_request(asked) is None
    assert len(idle_step(p).aborted_handoffs) == 1
    p.add(waiting)
    [save] = step(p, waiting, 300).saves
    assert save.plan.keys.hash_of(0) != before
    assert save.weights == {0: 1}
    assert Handoff.of(p.finish_request(waiting)).weights_update is not None


def test_the_engines_own_kv_of_earlier_weights_is_not_saved(scheduler_of):
    p = scheduler_of(role="prefill")
    step(p, request(), 300)
    p.report(written(since=2))
    cached, new = request(request_id="cached"), request(request_id="new")
    assert [found(p, cached, 128), found(p, new)] == [0, 0]
    cached.num_computed_tokens = 128
    assert step(p, cached, 172).saves == []
    assert step(p, new, 300).saves
    p.saves.block_pool.cached_block_hash_to_block = {}
    assert p.reset()
    after = request(request_id="after")
    assert found(p, after, 128) == 0
    after.num_computed_tokens = 128
    assert step(p, after, 172).saves, "what vLLM's cache has now was computed since"


def test_no_request_uses_the_pool_until_all_ranks_have_told_and_none_with_an_image(scheduler_of):
    p = scheduler_of(role="prefill", num_ranks=2)
    p.report(written(since=1))
    assert p.add(request()) is None
    p.report(StepReport(weights={0: RankWeights(1, b"", 1, 1), 1: RankWeights(1, b"", 1, 1)}))
    assert p.add(request()) is not None
    image = vllm_request(PROMPT, request_id="image", mm_features=[picture(1)])
    assert p.add(image) is None
