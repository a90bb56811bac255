"""The mini engine gives the answers of transformers, however it batches and chunks."""

from __future__ import annotations

import pytest
import torch

from examples.mini_engine.attention import Chunk
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Finish, Request
from tests.support.mini_engine_kit import SHAPES, Gate, ask, assert_same, expect, prompt_of


@pytest.mark.parametrize("chunk", [7, 64, 400])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_of_transformers_alone_and_in_a_batch(
    open_engine, checkpoints, shape, chunk
):
    engine = open_engine(shape, max_num_batched_tokens=chunk)
    prompts = [prompt_of(n) for n in (1, 16, 17, 50, 130)]
    together = [ask(engine, prompt) for prompt in prompts]
    for prompt, asked in zip(prompts, together, strict=True):
        expected = expect(checkpoints[shape], prompt)
        assert_same(asked.wait(), *expected)
        assert_same(ask(engine, prompt).wait(), *expected)
        assert asked.request.num_prefill_tokens == len(prompt)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_can_be_aborted_in_prefill_and_in_decode(open_engine, monkeypatch, steps):
    engine = open_engine(max_num_batched_tokens=16)
    gate = Gate(engine, monkeypatch)
    asked = ask(engine, prompt_of(32))
    for _ in range(steps):
        gate.wait_for_step()
        gate.open(1)
    gate.wait_for_step()
    assert asked.request.state.value == ("prefill" if steps == 1 else "decode")
    engine.abort(asked.request)
    gate.open()
    assert asked.wait().finish == Finish("abort")
    assert len(asked.ids) == steps


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_each_layer_is_reported_when_its_kv_is_written(open_engine, num_tokens):
    """Then it may be saved while later layers compute."""
    engine = open_engine()
    cache = PagedCache(
        2, engine.model.num_kv_heads, engine.model.head_dim, 1, 16, torch.float, "cpu"
    )
    request = Request(token_ids=prompt_of(num_tokens), max_tokens=1, sink=print, block_ids=[0])
    written = []

    def layer_written(layer):
        is_filled = [bool(kv[0, :num_tokens].all(dim=-1).any()) for kv in cache.layers]
        written.append((layer, is_filled))

    engine.model.forward([Chunk(request, 0, num_tokens)], cache, layer_written)
    assert written == [(0, [True, False]), (1, [True, True])]
