"""A request of a model that keeps states: where it is saved, and what is loaded of it."""

from __future__ import annotations

import pytest
import torch

from pdstore import EngineRequest, Handoff, HandoffId, JobEnd, PromptTimes, Reason
from pdstore.errors import Direction
from pdstore.scheduler import prefix_cache
from pdstore.store import open_store
from tests.support.kv import Instance, eventually, settings_of
from tests.support.states import LAYERS, NO_WINDOW, STATES, StateInstance, slot_of

BLOCK = 64
PROMPT = list(range(1, 301))


@pytest.fixture(params=["memory://", "file://{}"])
def store(request, closed_after, tmp_path):
    return closed_after(open_store(request.param.format(tmp_path / "pool"), settings_of()))


@pytest.fixture
def instance(store, closed_after):
    return lambda layers=NO_WINDOW: closed_after(StateInstance(store, layers))


@pytest.fixture
def p(instance):
    return instance()


def handed_over_by(request: EngineRequest) -> EngineRequest:
    """The request as P has it: a hand-off that its prompt's last save publishes."""
    request.handoff = HandoffId.new()
    return request


def compute(request, *stops, ends=(), start=0):
    """The saves of a prompt that is computed in these steps, each of which leaves its ends."""
    plans = []
    for stop in stops:
        request.begin_step(start, stop)
        plans.append(request.plan_save(start, stop, [at for at in ends if start < at <= stop]))
        start = stop
    return [plan and (plan.first_token, plan.keys.num_tokens) for plan in plans], plans


def found_by(instance, tokens, num_present=0, params=None):
    request = instance.request(tokens, params)
    eventually(request.poll)
    return request, request.find(num_present, len(tokens))


# ---- saves without a hand-off


@pytest.mark.parametrize(
    ("ends", "saved"),
    [
        ((), [None, None, None]),
        ((128,), [(0, 128), None, None]),
        ((256,), [None, (0, 256), None]),
        ((64, 128, 256), [(0, 128), (128, 256), None]),
        ((100, 200, 300), [None, None, None]),
    ],
    ids=str,
)
def test_a_save_ends_at_a_block_after_which_its_step_leaves_a_state(p, ends, saved):
    request = p.request(PROMPT, may_load=False)
    assert compute(request, 140, 260, 300, ends=ends)[0] == saved


def test_a_step_that_ends_inside_a_block_saves_up_to_the_state_before(p):
    request = p.request(PROMPT, may_load=False)
    assert compute(request, 200, 300, ends=(128,))[0] == [(0, 128), None]


def test_a_prompt_of_other_layers_is_saved_whatever_states_are_named(p, closed_after, store):
    one = closed_after(Instance(store))
    request = EngineRequest(one.cache, settings_of(), one.cache.keys(PROMPT), may_load=False)
    assert compute(request, 200, 300)[0] == [(0, 192), (192, 256)]


def test_a_second_prompts_state_inside_a_claimed_range_is_saved_once(p, monkeypatch):
    """The first prompt's save has the same KV, but no state where the second one parts from it."""

    def other():
        return p.request([*PROMPT[:150], *range(2000, 2150)], may_load=False)

    assert compute(p.request(PROMPT, may_load=False), 300, ends=(256,))[0] == [(0, 256)]
    assert compute(other(), 128, 300, ends=(128, 256))[0] == [(64, 128), (128, 256)]
    assert compute(other(), 128, 300, ends=(128, 256))[0] == [None, None]
    monkeypatch.setattr(prefix_cache, "CLAIM_TIMEOUT_S", -1.0)
    assert compute(other(), 128, ends=(128,))[0] == [(0, 128)], "it may have failed"


def test_a_state_that_a_save_passes_over_is_not_claimed(p):
    """A request that was preempted computes again what the pool has, and leaves a state there."""
    _, [plan] = compute(p.request(PROMPT, may_load=False), 256, ends=(256,))
    p.saved(plan, {256})
    request, end = found_by(p, range(1, 401))
    assert (end, compute(request, 330, ends=(128, 320))[0]) == (256, [(256, 320)])
    other = p.request([*PROMPT[:150], *range(2000, 2150)], may_load=False)
    assert compute(other, 128, ends=(128,))[0] == [(64, 128)]


def test_a_state_in_a_claimed_range_is_saved_with_the_window_before_it(instance):
    one = instance(LAYERS)
    assert compute(one.request(PROMPT, may_load=False), 300, ends=(256,))[0] == [(0, 256)]
    other = one.request([*PROMPT[:250], *range(2000, 2050)], may_load=False)
    assert compute(other, 192, ends=(192,))[0] == [(64, 192)], "92..191 are in its window"


# ---- hand-offs


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 256, 300])
def test_a_hand_off_is_published_with_the_state_after_its_last_token(p, num_tokens):
    request = handed_over_by(p.request(PROMPT[:num_tokens], may_load=False))
    _, plans = compute(request, num_tokens, ends=(num_tokens,))
    assert [plan.handoff for plan in plans] == [request.handoff]
    assert request.end() is None


@pytest.mark.parametrize("num_tokens", [63, 64, 256, 300])
@pytest.mark.parametrize("ends", [(), (64,), (128, 192)], ids=str)
def test_a_hand_off_without_that_state_is_never_published_and_d_is_told(p, num_tokens, ends):
    ends = [end for end in ends if end < num_tokens]
    request = handed_over_by(p.request(PROMPT[:num_tokens], may_load=False))
    saved, plans = compute(request, num_tokens, ends=ends)
    assert saved == ([(0, max(ends))] if ends else [None]), "nobody can go on behind it"
    assert not any(plan.handoff for plan in plans if plan)
    assert request.answer == {}
    assert request.end() == request.handoff


def test_kv_of_a_hand_off_goes_before_its_state(p):
    request = handed_over_by(p.request(PROMPT, may_load=False))
    saved, plans = compute(request, 100, 200, 300, ends=(300,))
    assert saved == [(0, 64), (64, 192), (192, 300)]
    assert [bool(plan.handoff) for plan in plans] == [False, False, True]
    assert all(plan.is_handed_off for plan in plans)


def test_a_state_of_an_aborted_hand_off_is_found_and_the_kv_behind_it_is_not(p, instance):
    asked = {**Handoff(HandoffId.new()).params(), "do_remote_decode": True}
    request = p.request(PROMPT, asked, may_load=False)
    _, plans = compute(request, 128, 300, ends=(128,))
    for plan in filter(None, plans):
        assert p.saved(plan, {128}).reason is None
    assert request.end().hex == asked["pdstore"]["attempt"]
    p.pool.abort_handoff(request.handoff).wait(10)
    d, end = found_by(instance(), [*PROMPT, 1], params={"pdstore": asked["pdstore"]})
    assert (end, d.reason) == (128, Reason.HANDOFF_FAILED)


@pytest.mark.parametrize("layers", [NO_WINDOW, LAYERS], ids=["states", "and a window"])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("at_once", [False, True], ids=["relayed", "concurrent"])
def test_d_has_all_of_a_prompt_but_its_last_token(instance, layers, num_tokens, at_once):
    p, d = instance(layers), instance(layers)
    num_handed = num_tokens - 1 or 1  # P drops the last token; of one token it keeps it
    prompt = PROMPT[:num_tokens]
    asked = {**Handoff(HandoffId.new()).params(), "do_remote_decode": True}
    at_p = p.request(prompt[:num_handed], asked, may_load=False)
    _, [plan] = compute(at_p, num_handed, ends=(num_handed,))
    assert p.saved(plan, {num_handed}).reason is None
    params = {"pdstore": asked["pdstore"]} if at_once else at_p.answer
    request, end = found_by(d, prompt, params=params)
    assert (end, request.reason) == (num_tokens - 1, None)
    if end:
        load(d, request, end)
        assert_same(p, d, end)


def load(d, request, end):
    """Loads into D's second dozen of blocks, and the state to P's place counted from the end."""
    plan = request.plan_load(end, 64 * 12)
    assert plan.keys.num_tokens == plan.num_tokens == end
    tables = d.tables(end, {end: 23 - slot_of(end)}, first=12)
    result = d.pool.begin_load(plan, tables).wait(20)
    assert (result.num_tokens, result.reason) == (end, None)
    request.ends.append(JobEnd("", None, Direction.LOAD, result.num_tokens, None))
    assert request.end_load() == end


def assert_same(p, d, end, *, states_only=False):
    """Asserts that D has P's state after so many tokens, and P's KV of all of them."""
    for layer, spec in enumerate(d.layout.identity.layers):
        if spec.table in STATES:
            theirs, ours = p.caches[layer], d.caches[layer].flip(0)
            assert torch.equal(theirs[slot_of(end)], ours[slot_of(end)])
        elif spec.window is None and not states_only:
            theirs, ours = p.caches[layer].flatten(0, 1), d.caches[layer].flatten(0, 1)
            assert torch.equal(theirs[:end], ours[12 * 64 : 12 * 64 + end])


def test_d_follows_a_prompt_that_ends_where_its_own_is_loaded(p, instance):
    handoff, params = p.cache.announce(p.cache.keys(PROMPT[:-1]))
    request, end = found_by(instance(), PROMPT, params=params)
    assert (end, request.found.follow) == (299, handoff)


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("layers", [NO_WINDOW, LAYERS], ids=["states", "and a window"])
def test_who_follows_p_has_the_whole_prompt_with_its_state_or_nothing(instance, layers, has_state):
    p, d = instance(layers), instance(layers)
    asked = {**Handoff(HandoffId.new()).params(), "do_remote_decode": True}
    at_p = p.request(PROMPT[:-1], asked, may_load=False)
    ends = (128, 299) if has_state else (128,)
    _, [first] = compute(at_p, 200, ends=ends)
    assert p.saved(first, {128}).reason is None
    at_d, end = found_by(d, PROMPT, params={"pdstore": asked["pdstore"]})
    plan = at_d.plan_load(end, 64 * 12)
    assert (end, plan.follow.hex, plan.keys.num_tokens) == (299, at_p.handoff.hex, 299)
    job = d.pool.begin_load(plan, d.tables(299, {299: 23 - slot_of(299)}, first=12))
    _, [last] = compute(at_p, 299, ends=ends, start=200)
    if last is not None:
        assert p.saved(last, {299}).reason is None
    if (handoff := at_p.end()) is not None:
        p.pool.abort_handoff(handoff)
    assert job.wait(20).num_tokens == (299 if has_state else 0)
    if has_state:
        assert_same(p, d, 299)


def test_d_does_not_follow_a_prompt_whose_last_token_p_kept(p, instance):
    """As for prompt logprobs. Only what is stored tells where the last state before it is."""
    handoff, params = p.cache.announce(p.cache.keys(PROMPT))
    request = instance().request(PROMPT, params)
    assert not request.poll(0.3), "it waits for P's end"
    p.put(PROMPT, 256, handoff=handoff)
    eventually(request.poll)
    assert (request.find(0, 300), request.reason) == (256, Reason.ABSENT)
    assert request.found.follow is None


# ---- prefixes that prompts share


def test_three_instances_share_a_prefix_as_one_would(instance):
    first, second, third = instance(), instance(), instance()
    prompts = [[*PROMPT[:150], *range(n, n + 150)] for n in (1000, 2000, 3000)]
    request, end = found_by(first, prompts[0])
    assert (end, request.junction) == (0, 0)
    _, plans = compute(request, 256, 300, ends=(256,))
    first.saved(plans[0], {256})
    request, end = found_by(second, prompts[1])
    assert (end, request.junction) == (0, 128), "the pool has no state there yet"
    saved, plans = compute(request, 128, 256, 300, ends=(128, 256))
    assert saved == [(0, 128), (128, 256), None]
    for plan in plans[:2]:
        second.saved(plan, {128, 256})
    request, end = found_by(third, prompts[2])
    assert (end, request.junction) == (128, 0)
    load(third, request, end)
    assert_same(second, third, end, states_only=True)
    assert compute(request, 256, ends=(256,), start=128)[0] == [(128, 256)]


@pytest.mark.parametrize(
    ("num_present", "changes"), [(128, {}), (192, {}), (0, {"role": "decode"})], ids=str
)
def test_no_junction_is_told_where_no_state_could_be_left_or_saved(p, num_present, changes):
    p.put(PROMPT, 256)
    request = p.request([*PROMPT[:150], *range(2000, 2150)], **changes)
    eventually(request.poll)
    assert request.find(num_present, 300) == num_present
    assert request.junction == 0


def test_a_prompt_that_is_found_whole_has_no_junction(p):
    p.put(PROMPT[:-1])
    request, end = found_by(p, PROMPT)
    assert (end, request.junction) == (299, 0)


# ---- answers, and the steps of an answer


def test_an_answer_is_saved_up_to_a_state_and_the_next_turn_goes_on_there(p, instance):
    tokens = [*PROMPT, *range(5000, 5200)]
    request = p.request(PROMPT, may_load=False)
    _, plans = compute(request, 256, 300, ends=(256,))
    p.saved(plans[0], {256})
    plan = request.plan_answer_save(448, tokens)
    assert (plan.first_token, plan.keys.num_tokens) == (256, 448)
    assert p.saved(plan, {448}).reason is None
    _, end = found_by(instance(), [*tokens, 7])
    assert end == 448


def test_an_answers_state_inside_a_claimed_range_is_saved(p):
    tokens = [*PROMPT, *range(5000, 5200)]
    longer, shorter = (p.request(PROMPT, may_load=False) for _ in range(2))
    for request in (longer, shorter):
        compute(request, 300)
    assert longer.plan_answer_save(448, tokens).first_token == 0
    plan = shorter.plan_answer_save(384, tokens)
    assert (plan.first_token, plan.keys.num_tokens) == (320, 384)
    assert shorter.plan_answer_save(384, tokens) is None, "it is planned once"


def test_an_answers_save_publishes_a_hand_off_whose_state_comes_with_it(p):
    request = handed_over_by(p.request(PROMPT[:256], may_load=False))
    assert compute(request, 256)[0] == [None]
    assert request.plan_answer_save(256, PROMPT).handoff == request.handoff
    assert request.end() is None


@pytest.mark.parametrize("stop", [449, 460, 499])
def test_an_answer_is_not_saved_up_to_a_token_without_a_state(p, stop):
    request = p.request(PROMPT, may_load=False)
    compute(request, 256, 300, ends=(256,))
    assert request.plan_answer_save(stop, [*PROMPT, *range(5000, 5200)]) is None


def test_d_saves_an_answer_behind_what_it_has_loaded(p, instance):
    p.put(PROMPT[:191])
    d = instance()
    request, end = found_by(d, PROMPT[:192])
    load(d, request, end)
    compute(request, 192, start=191)
    plan = request.plan_answer_save(256, PROMPT)
    assert (plan.first_token, plan.keys.num_tokens, plan.first_read) == (191, 256, 128)


@pytest.mark.parametrize("is_p", [False, True])
@pytest.mark.parametrize("ends", [(), (256,)], ids=str)
def test_steps_of_an_answer_need_not_look_at_a_request_whose_state_is_missing(p, is_p, ends):
    request = p.request(PROMPT[:256], may_load=False)
    if is_p:
        handed_over_by(request)
    compute(request, 128, ends=ends)
    assert not request.is_settled
    compute(request, 256, start=128, ends=ends)
    request.end_prompt()
    assert request.is_settled


def test_a_preempted_request_is_looked_at_until_its_prompt_is_computed_again(p):
    request = p.request(PROMPT, may_load=False)
    compute(request, 300)
    request.end_prompt()
    assert request.is_settled
    assert compute(request, 128, ends=(128,))[0] == [(0, 128)]
    assert not request.is_settled
    assert compute(request, 256, ends=(256,), start=128)[0] == [(128, 256)]
    assert request.is_settled, "all is saved"


def test_a_load_that_fell_short_is_mended_by_saves_that_end_at_states(p):
    p.put(PROMPT, 128, 256)
    request, end = found_by(p, PROMPT)
    request.plan_load(end, 320)
    request.ends.append(JobEnd("", None, Direction.LOAD, 0, Reason.LOST))
    assert (end, request.end_load(), request.find(0, 300)) == (256, 0, 0)
    assert compute(request, 128, 200, 300, ends=(128,))[0] == [(0, 128), None, None]


# ---- load or compute


def test_what_a_state_belongs_to_is_loaded_whole_or_not_at_all(p):
    times = PromptTimes.from_settings(settings_of(load="auto"), p.namespace, p.cache.metrics)
    for seconds in (0.0, 10.0):  # the store's first load tells little
        times.decide("a", start=0, found=1000, num_tokens=1000)
        times.load_ended("a", 1000, seconds)
        times.forget("a")
    times.decide("b", start=0, found=0, num_tokens=1000)
    times.begin_step("b", 0, 1000)
    times.end_prompt("b")
    ways = {times.decide(n, start=0, found=5000, num_tokens=5000).num_tokens for n in range(600)}
    assert ways == {0, 5000}, "one prompt in 256 is loaded to measure it"
