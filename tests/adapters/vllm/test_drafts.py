"""A draft model's KV is handed over: D's drafts are accepted as often as those of one instance."""

from __future__ import annotations

import pytest

from tests.adapters.vllm.asking import assert_idle, new_prompt
from tests.adapters.vllm.drafting import (
    COLD,
    LENGTHS,
    by_itself,
    drafting,
    eagle,
    mtp,
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
    assert behind_p.loaded == sum(LENGTHS)
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
