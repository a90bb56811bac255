"""Several turns of a conversation: what D decoded is found by the next turn's P."""

from __future__ import annotations

import pytest

from tests.support.mini_engine_kit import (
    ask,
    assert_same,
    decode,
    expect,
    hand_over,
    prompt_of,
    until_stored,
)

BLOCK = 64
SAVING = {"save_decoded": True}


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(200, 150), (64, 65), (10, 54), (63, 2)])
def test_the_next_turn_loads_the_prompt_and_the_answer_on_p(
    open_instance, checkpoints, num_prompt, num_answer
):
    p, d = open_instance("prefill"), open_instance("decode", pd=SAVING)
    prompt = prompt_of(num_prompt)
    first = ask(d, prompt, num_answer, kv_transfer_params=hand_over(p, prompt)).wait()
    assert_same(first, *expect(checkpoints["llama"], prompt, num_answer))
    until_stored(d)
    turn = prompt + first.ids + prompt_of(3)
    asked = ask(p, turn, max_tokens=1, kv_transfer_params={"do_remote_decode": True}).wait()
    # The last token of an answer is never computed in its own turn.
    whole_blocks = (num_prompt + num_answer - 1) // BLOCK * BLOCK
    assert asked.request.num_loaded == whole_blocks
    assert asked.request.num_fed == len(turn) - whole_blocks
    second = decode(d, turn, asked.request.answer_params)
    assert_same(second, *expect(checkpoints["llama"], turn))
    assert second.request.num_fed == 1


def test_what_d_had_to_compute_is_saved_with_the_answer(open_instance):
    d, p = open_instance("decode", pd=SAVING), open_instance("prefill")
    prompt = prompt_of(100)
    first = ask(d, prompt, 100).wait()
    assert first.request.num_loaded == 0
    until_stored(d)
    asked = ask(p, prompt + first.ids, max_tokens=1).wait()
    assert asked.request.num_loaded == 192
