"""EngineRequest: what an engine loads and saves for a request, and what its end leaves."""

from __future__ import annotations

import time

import pytest

from pdstore import EngineRequest, Handoff, HandoffId, JobEnd, Reason
from pdstore.errors import Direction
from pdstore.format.keys import PromptKeys
from pdstore.scheduler import prefix_cache
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import eventually, parsed_handoffs, settings_of

BLOCK, PROMPT = 64, list(range(1, 301))
ROOM = 320
TOKENS = [*PROMPT, *range(1000, 1200)]


@pytest.fixture
def instance_(instance):
    return instance()


@pytest.fixture
def request_of(instance_):
    """Makes requests of the prompt: `request_of(role="prefill")`; params is the hand-off."""

    def make(params=None, *, may_load=False, tokens=PROMPT, **settings):
        keys = instance_.cache.keys(tokens)
        settings = settings_of(**settings)
        return EngineRequest(instance_.cache, settings, keys, params, may_load=may_load)

    return make


def saved(instance, tokens=PROMPT):
    table = list(range(1, len(tokens) // 16 + 2))
    instance.pool.save(instance.cache.keys(tokens), table).wait(20)


def published_by(request):
    """The request as P has it: a hand-off that its prompt's last save publishes."""
    request.handoff = HandoffId.new()
    return request


def compute(request, *chunks, start=0):
    """The saves of a prompt that is computed in these chunks."""
    saves = []
    for num_tokens in chunks:
        request.begin_step(start, start + num_tokens)
        saves.append(request.plan_save(start, start + num_tokens))
        start += num_tokens
    return saves


def end_load(request, num_tokens, reason=None):
    assert request.is_loading
    request.ends.append(JobEnd("", None, Direction.LOAD, num_tokens, reason))
    assert not request.is_loading
    return request.end_load()


def loaded(request, num_present=0):
    eventually(request.poll)
    end = request.find(num_present, len(PROMPT))
    return request.plan_load(end, ROOM)


def test_a_stored_prompt_is_loaded_behind_what_the_engine_has(request_of, instance_):
    saved(instance_)
    request = request_of(may_load=True)
    plan = loaded(request, num_present=2 * BLOCK)
    assert (plan.first_token, plan.num_tokens, plan.keys.num_tokens) == (2 * BLOCK, 300, 300)
    assert end_load(request, 300) == 300
    assert request.reason is None
    assert compute(request, 1, start=299) == [None], "it is in the pool"


def test_a_load_that_fell_short_is_not_tried_again_and_what_it_brought_is_not_saved_again(
    request_of, instance_
):
    saved(instance_)
    request = request_of(may_load=True)
    loaded(request)
    assert end_load(request, 128, Reason.LOST) == 128
    sample = instance_.cache.metrics.registry.get_sample_value
    tokens = [sample("pdstore_tokens_total", {"verb": verb}) for verb in ("promised", "lost")]
    assert tokens == [300, 172]
    assert request.reason is Reason.LOST
    assert request.find(0, len(PROMPT)) == 0
    [save] = compute(request, 172, start=128)
    assert (save.first_token, save.keys.num_tokens) == (128, 256)


def test_a_save_begins_behind_what_the_pool_has_even_without_a_load(request_of, instance_):
    saved(instance_, PROMPT[:192])
    request = request_of(may_load=True)
    eventually(request.poll)
    assert request.find(256, len(PROMPT)) == 256
    [save] = compute(request, 44, start=256)
    assert (save.first_token, save.first_read, save.keys.num_tokens) == (192, 192, 256)


def test_prompts_that_come_together_save_what_they_share_once(request_of, instance_, monkeypatch):
    assert [save.first_token for save in compute(request_of(), 300)] == [0]
    [second] = compute(request_of(tokens=[*PROMPT[:192], *range(2000, 2108)]), 300)
    assert (second.first_token, second.keys.num_tokens) == (192, 256)
    assert compute(request_of(), 300) == [None]
    assert instance_.cache.clear()
    assert [save.first_token for save in compute(request_of(), 300)] == [0], "the pool lost it"
    monkeypatch.setattr(prefix_cache, "CLAIM_TIMEOUT_S", -1.0)
    assert [save.first_token for save in compute(request_of(), 300)] == [0], "it may have failed"


def test_all_saves_of_a_prompt_tell_where_and_when_the_first_one_began(request_of):
    saves = compute(published_by(request_of()), 64, 64, 172)
    assert [save.first_token for save in saves] == [0, 64, 128]
    [(first_token, began)] = {save.first_save for save in saves}
    assert (first_token, began <= time.monotonic()) == (0, True)


def test_a_tail_is_saved_only_for_another_instance(request_of):
    saves = compute(request_of(), 280, 20, 1)
    assert [save and save.keys.num_tokens for save in saves] == [256, None, None]
    saves = compute(published_by(request_of()), 280, 20, 1)
    assert [save and save.keys.num_tokens for save in saves] == [256, 300, None]


@pytest.mark.parametrize(("on_miss", "failure"), [("fail", Reason.LOST), ("compute", None)])
def test_a_hand_off_that_fell_short_fails_its_request_where_the_setting_says_so(
    request_of, instance_, on_miss, failure
):
    saved(instance_)
    request = request_of(may_load=True, on_miss=on_miss)
    request.given = Handoff(HandoffId.new())
    loaded(request)
    end_load(request, 128, Reason.LOST)
    assert request.failure is failure


def test_the_last_chunk_publishes_the_hand_off_and_may_read_the_whole_prompt(request_of):
    request = published_by(request_of())
    saves = compute(request, 256, 44)
    assert [save.handoff for save in saves] == [None, request.handoff]
    assert [save.first_read for save in saves] == [0, 0]
    assert request.end() is None


def test_a_hand_off_that_nothing_publishes_is_left_to_be_aborted(request_of):
    request = published_by(request_of())
    compute(request, 256)
    assert request.end() == request.handoff
    assert request.answer == {}


def test_a_hand_off_of_a_prompt_that_is_saved_already_is_published_all_the_same(request_of):
    request = published_by(request_of())
    request.num_saved = len(PROMPT)
    [save] = compute(request, 1, start=299)
    assert save.handoff == request.handoff


def test_d_is_told_once_that_p_has_begun_where_both_were_asked_at_once(request_of):
    asked = Handoff(HandoffId.new())
    p = request_of({**asked.params(), "do_remote_decode": True}, role="both")
    first, second = compute(p, 128, 172)
    announced, num_tokens = first.announce
    assert (announced.hex, num_tokens) == (asked.id.hex, len(PROMPT))
    assert second.announce is None


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
@pytest.mark.parametrize("more", [{}, {"do_remote_decode": True}])
def test_kv_transfer_params_are_parsed_once_a_request(request_of, monkeypatch, role, more):
    params, parsed = Handoff(HandoffId.new()).params() | more, parsed_handoffs(monkeypatch)
    request = request_of(params, may_load=True, role=role)
    assert (request.given is None) != (request.handoff is None)
    request.end()
    assert parsed == [params]


def test_a_decode_instance_saves_no_prompt(request_of):
    assert compute(request_of(role="decode"), 300) == [None]


def test_an_answer_is_not_saved_behind_a_load_that_fell_short(instance_, request_of):
    whole = request_of(save_decoded=False)
    compute(whole, 300)
    assert whole.plan_answer_save(400, TOKENS) is None, "answers are not saved"
    saved(instance_)
    request = request_of(may_load=True)
    eventually(request.poll)
    compute(request, 300)
    loaded(request)  # it was preempted, and loads again
    assert request.plan_answer_save(400, TOKENS) is None, "it still loads"
    end_load(request, BLOCK, Reason.LOST)
    assert request.plan_answer_save(400, TOKENS) is None, "vLLM may not have been told yet"


@pytest.mark.parametrize("num_prompt", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 200])
@pytest.mark.parametrize("stop", [201, 255, 256, 257, 500])
def test_decoded_blocks_have_the_keys_of_the_next_turns_prompt(request_of, num_prompt, stop):
    request = request_of(tokens=TOKENS[:num_prompt])
    compute(request, num_prompt)
    save, end = request.plan_answer_save(stop, TOKENS), stop // BLOCK * BLOCK
    assert (save is None) == (end <= num_prompt // BLOCK * BLOCK)
    if save is not None:
        whole = PromptKeys(request.keys.namespace).extend(TOKENS[:end])
        assert save.keys.hashes() == whole.hashes()
    assert request.plan_answer_save(stop, TOKENS) is None, "it is planned once"
    assert request.keys.num_tokens == num_prompt


def test_a_request_that_has_left_the_pool_saves_loads_and_hands_over_nothing(request_of, instance_):
    saved(instance_)
    request = published_by(request_of(may_load=True))
    eventually(request.poll)
    request.leave_pool()
    assert request.find(0, len(PROMPT)) == 0
    assert compute(request, 128, 172) == [None, None]
    assert request.plan_answer_save(400, TOKENS) is None
    assert request.answer == {}
    assert request.end() == request.handoff, "D need not wait for it"
