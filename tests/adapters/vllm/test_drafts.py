"""A draft model's KV is handed over: D's drafts are accepted as often as those of one instance."""

from __future__ import annotations

import pytest

from tests.adapters.vllm.asking import Since, assert_idle, new_prompt
from tests.adapters.vllm.drafting import (
    COLD,
    LENGTHS,
    by_itself,
    drafting,
    eagle,
    mtp,
    other_eagle,
    relayed,
)

ENOUGH = 0.3  # of the drafts of one instance are accepted
MAX_DIFFERENCE = 0.02
COLD_RATE = 0.1  # at most, if D's draft model has no KV of the prompt


def assert_drafts_are_handed_over(instances):
    """D computes one token of each prompt, and drafts as well as it does by itself."""
    p, d = instances.start("p", "prefill"), instances.start("d", "decode")
    cold = instances.start("cold", "decode", COLD)
    instances.wait_ready()
    prompts = [new_prompt(num_tokens) for num_tokens in LENGTHS]
    one, behind_p = by_itself(d, prompts), relayed(p, d, prompts)
    assert (behind_p.loaded, behind_p.cold) == (sum(LENGTHS), 0)
    assert behind_p.computed <= len(prompts)
    assert behind_p.ids == one.ids
    for answer, expected in zip(behind_p.answers, one.answers, strict=True):
        answer.assert_same(expected)
    assert one.rate > ENOUGH
    print(f"accepted of one instance {one.rate:.3f}, behind P {behind_p.rate:.3f}")
    assert abs(behind_p.rate - one.rate) <= MAX_DIFFERENCE
    control = relayed(p, cold, prompts)
    assert control.loaded == sum(LENGTHS)
    assert control.ids == one.ids, "drafts decide when tokens come, and not which"
    print(f"without the draft model's KV {control.rate:.3f}")
    assert control.rate <= COLD_RATE
    assert_idle(p)
    assert_idle(d)


def test_eagle_s_drafts_behind_p_are_accepted_as_those_of_one_instance(launcher, tmp_path):
    with drafting(launcher, eagle(tmp_path), f"file://{tmp_path}/pool") as instances:
        assert_drafts_are_handed_over(instances)


@pytest.mark.nightly
def test_mtp_s_drafts_behind_p_are_accepted_as_those_of_one_instance(launcher, tmp_path):
    with drafting(launcher, mtp(tmp_path), f"file://{tmp_path}/pool") as instances:
        assert_drafts_are_handed_over(instances)


@pytest.fixture
def eagles(launcher, tmp_path):
    """Instances of a Llama with an EAGLE draft model."""
    with drafting(launcher, eagle(tmp_path), f"file://{tmp_path}/pool") as instances:
        yield instances


@pytest.mark.nightly
def test_instances_with_other_drafts_and_with_none_hand_over_to_each_other(eagles, tmp_path):
    """What they share is the target's KV: D's drafts are then wrong, and its answers are right."""
    others = other_eagle(eagles.model.path, tmp_path / "other")
    p, d = eagles.start("p", "prefill"), eagles.start("d", "decode")
    plain_p = eagles.start("plain-p", "prefill", drafts=())
    plain_d = eagles.start("plain-d", "decode", drafts=())
    other_d = eagles.start("other-d", "decode", drafts=others)
    eagles.wait_ready()
    for giver, taker in ((plain_p, d), (p, plain_d), (p, other_d), (plain_p, plain_d)):
        prompts = [new_prompt(num_tokens) for num_tokens in LENGTHS]
        behind_p, one = relayed(giver, taker, prompts), by_itself(taker, prompts)
        pair = f"{giver.name} -> {taker.name}"
        assert behind_p.loaded == sum(LENGTHS), pair
        assert behind_p.computed <= len(prompts), pair
        assert behind_p.ids == one.ids == by_itself(plain_d, prompts).ids, pair
        assert behind_p.cold == (0 if taker is plain_d else sum(LENGTHS)), pair
        if taker is not plain_d:
            print(f"accepted of {taker.name} {one.rate:.3f}, {pair} {behind_p.rate:.3f}")
            assert one.rate > ENOUGH, pair
            assert behind_p.rate <= COLD_RATE, pair
    for server in (p, d, plain_p, plain_d, other_d):
        assert "does not fit" not in server.log.read_text()
        assert_idle(server)


@pytest.mark.nightly
def test_a_second_round_loads_the_first_one_s_drafts(eagles):
    """The instance that computes the second prompt has loaded most of it, and drafts of it too."""
    a, b = eagles.start("a", "both"), eagles.start("b", "both")
    eagles.wait_ready()
    prompts = [new_prompt(num_tokens) for num_tokens in LENGTHS]
    first = relayed(a, b, prompts)
    assert_idle(b)  # it has saved what it has
    turns = [
        [*prompt, *ids, *new_prompt(40)] for prompt, ids in zip(prompts, first.ids, strict=True)
    ]
    since = Since(a)
    second = relayed(a, b, turns)
    assert since.loaded >= sum(len(prompt) // 64 * 64 for prompt in prompts)
    one = by_itself(b, turns)
    print(f"accepted of one instance {one.rate:.3f}, in the second round {second.rate:.3f}")
    assert second.ids == one.ids
    assert abs(second.rate - one.rate) <= MAX_DIFFERENCE
    for server in (a, b):
        assert_idle(server)


@pytest.mark.nightly
def test_prompts_that_are_too_long_for_the_draft_model_are_handed_over_without(launcher, tmp_path):
    """vLLM does not run the draft model in their steps, so its cache has rows of others there."""
    model = eagle(tmp_path, max_model_len=150)
    with drafting(launcher, model, f"file://{tmp_path}/pool") as instances:
        p, d = instances.start("p", "prefill"), instances.start("d", "decode")
        instances.wait_ready()
        for num_tokens, num_cold in ((100, 0), (140, 0), (149, 149), (200, 200)):
            prompts = [new_prompt(num_tokens)]
            behind_p = relayed(p, d, prompts)
            assert (behind_p.loaded, behind_p.cold) == (num_tokens, num_cold), num_tokens
            assert behind_p.ids == by_itself(d, prompts).ids, num_tokens
