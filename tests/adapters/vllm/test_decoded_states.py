"""Answers of a model with states: what vLLM keeps of them while it decodes is what others load."""

from __future__ import annotations

import pytest

from tests.adapters.vllm.asking import Since, ask, assert_idle, new_prompt
from tests.adapters.vllm.replaying import DELTA_NET, instances

pytestmark = pytest.mark.nightly

EVERY_BLOCK = "--prefix-cache-retention-interval=128"
"""Without it vLLM keeps no state of an answer, so none of an answer is saved."""


@pytest.fixture(scope="module")
def instances_ab(launcher, checkpoints, tmp_path_factory):
    """Two instances over one pool."""
    directory = tmp_path_factory.mktemp("decoded")
    options = (*DELTA_NET, EVERY_BLOCK)
    with instances(launcher, checkpoints("qwen3_next"), directory, *options) as made:
        started = [made.start(name, f"file://{directory}/pool", "both") for name in "ab"]
        made.wait_ready()
        yield started


@pytest.mark.parametrize(
    ("num_prompt", "num_answered", "num_loaded"), [(200, 300, 384), (40, 100, 128), (100, 29, 128)]
)
def test_the_next_turn_goes_on_from_a_state_in_the_answer(
    instances_ab, num_prompt, num_answered, num_loaded
):
    first, second = instances_ab
    prompt = new_prompt(num_prompt)
    answer = ask(first, prompt, num_answered, ignore_eos=True)
    assert_idle(first)
    turn = [*prompt, *answer.ids, *new_prompt(20)]
    since = Since(second)
    ask(second, turn)
    assert (since.loaded, since.computed) == (num_loaded, len(turn) - num_loaded)
