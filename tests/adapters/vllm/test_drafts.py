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
FALLS_BY = 0.25  # at least, if D's drafts start without KV of the prompt


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
    assert abs(behind_p.rate - one.rate) <= MAX_DIFFERENCE
    print(f"accepted: one {one.rate}, behind P {behind_p.rate}; {one.computed} {one.loaded}")
    control = relayed(p, cold, prompts)
    assert control.loaded == sum(LENGTHS)
    assert control.ids == one.ids, "drafts decide when tokens come, and not which"
    assert control.rate < one.rate - FALLS_BY
    print(f"accepted: one {one.rate:.3f}, behind P {behind_p.rate:.3f}, cold {control.rate:.3f}")
    assert_idle(p)
    assert_idle(d)


def test_eagle_s_drafts_behind_p_are_accepted_as_those_of_one_instance(launcher, tmp_path):
    with drafting(launcher, eagle(tmp_path), f"file://{tmp_path}/pool") as instances:
        assert_drafts_are_handed_over(instances)


@pytest.mark.nightly
def test_mtp_s_drafts_behind_p_are_accepted_as_those_of_one_instance(launcher, tmp_path):
    with drafting(launcher, mtp(tmp_path), f"file://{tmp_path}/pool") as instances:
        assert_drafts_are_handed_over(instances)
