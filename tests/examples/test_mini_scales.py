"""A quantized cache whose scales are tensors of their own: D answers as one instance does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pdstore
from examples.mini_engine.paged_cache import PagedCache
from pdstore import read_settings
from tests.support.engine_pools import store_url as store_url
from tests.support.mini_engine_kit import (
    DEADLINE_S,
    ask,
    assert_next_turn_loads_the_answer_too,
    assert_right_over_a_faulty_store,
    assert_same,
    decode,
    hand_over,
    hand_over_at_once,
    pd_of,
    prompt_of,
)

BLOCK = 64
INT8 = {"kv_cache_dtype": "int8"}
LENGTHS = (1, 2, 40, 64, 65, 66, 128, 129, 200)


@pytest.fixture
def alone(open_engine):
    """An engine without a pool."""
    return open_engine(**INT8)


@pytest.fixture
def open_one(open_instance):
    """Makes an instance with a quantized cache."""
    return lambda role, **options: open_instance(role, **INT8, **options)


def assert_as(asked, alone):
    """It is the answer of an engine alone, but for the last digits of logprobs."""
    expected = ask(alone, asked.request.prompt).wait()
    assert_same(asked, expected.ids, expected.logprobs)


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_d_computes_one_token_and_answers_as_an_engine_alone(
    open_engine, store_url, alone, is_concurrent
):
    """Over each store."""
    p, d = (open_engine(pd=pd_of(role, store_url), **INT8) for role in ("prefill", "decode"))
    for num_tokens in LENGTHS:
        prompt = prompt_of(num_tokens)
        if is_concurrent:
            asked = hand_over_at_once(p, d, prompt)
        else:
            asked = decode(d, prompt, hand_over(p, prompt))
        assert_as(asked, alone)
        assert (asked.request.num_loaded, asked.request.num_prefill_tokens) == (num_tokens - 1, 1)


@pytest.mark.parametrize(("p_size", "d_size"), [(32, 16), (16, 48), (48, 16)])
@pytest.mark.parametrize("state", [False, True])
def test_engine_blocks_may_differ_between_p_and_d(open_one, open_engine, p_size, d_size, state):
    """Of a model with a state too, and after the self-test of each instance."""
    pd = {"block_tokens": 96, "layer_ranges": 2, "selftest": True}
    p = open_one("prefill", pd=pd, block_size=p_size, state=state)
    d = open_one("decode", pd=pd, block_size=d_size, state=state)
    alone = open_engine(block_size=d_size, state=state, **INT8)
    for num_tokens in (40, 97, 200):
        prompt = prompt_of(num_tokens)
        asked = decode(d, prompt, hand_over(p, prompt))
        assert_as(asked, alone)
        assert asked.request.num_loaded == num_tokens - 1


def test_two_ranks_hand_over_what_an_engine_on_one_has_computed(open_engine, alone):
    """They load P's blocks, each its head of every token, and store them for a D on one device."""
    urls = "memory://scales-of-one", "memory://scales-of-two"
    p, d = (
        open_engine(pd=pd_of(role, url, kv_shards=2), **INT8)
        for role, url in zip(("prefill", "decode"), urls, strict=True)
    )
    for num_tokens in (40, 64, 200):
        prompt = prompt_of(num_tokens)
        params = pass_on_by_two_ranks(p, urls, prompt, hand_over(p, prompt))
        asked = decode(d, prompt, params)
        assert_as(asked, alone)
        assert asked.request.num_loaded == num_tokens - 1


def pass_on_by_two_ranks(p, urls, prompt, params):
    """Loads a hand-off of the first store and saves it in the second, by ranks of TP 2.

    Returns the `kv_transfer_params` of the second hand-off.
    """
    layout, namespace = p.adapter.pool.layout, p.adapter.cache.namespace
    settings = [
        read_settings(**pd_of(role, url, kv_shards=2))
        for role, url in zip(("decode", "prefill"), urls, strict=True)
    ]
    found, stored = (pdstore.PrefixCacheManager(each, namespace) for each in settings)
    keys = found.lookup(found.keys(prompt), params).wait(DEADLINE_S).keys
    handoff, passed_on = stored.announce(keys)
    caches = [[torch.zeros_like(tensor) for tensor in layer] for layer in p.cache.layers]
    table = list(range(-(-len(prompt) // p.cache.block_size)))
    for rank in range(2):
        its_heads = slice(rank, rank + 1)
        its_caches = [tuple(tensor[:, :, its_heads] for tensor in layer) for layer in caches]
        its_layout = replace(layout, tp_rank=rank, tp_size=2)
        loads, saves = (
            pdstore.KVPool(each, its_layout, its_caches, namespace) for each in settings
        )
        assert loads.load(keys, table).wait(DEADLINE_S).num_tokens == len(prompt)
        saved = saves.save(keys, table, handoff=handoff)
        assert saved.wait(DEADLINE_S).num_tokens == len(prompt)
        loads.close()
        saves.close()
    found.close()
    stored.close()
    return passed_on


def test_without_the_scales_d_answers_something_else(open_one, alone, monkeypatch):
    """So the tests of this file would notice scales that were not handed over."""
    p = open_one("prefill")
    prompts = [prompt_of(num_tokens) for num_tokens in (40, 65, 200)]
    params = [hand_over(p, prompt) for prompt in prompts]
    make_pool = pdstore.KVPool

    def load_into_other_scales(settings, layout, caches, *more, **options):
        apart = [(key, value, *map(torch.clone, scales)) for key, value, *scales in caches]
        return make_pool(settings, layout, apart, *more, **options)

    monkeypatch.setattr(pdstore, "KVPool", load_into_other_scales)
    d = open_one("decode")
    for prompt, handed in zip(prompts, params, strict=True):
        asked = decode(d, prompt, handed)
        assert asked.request.num_loaded == len(prompt) - 1
        assert asked.ids != ask(alone, prompt).wait().ids


def test_an_engine_whose_cache_is_not_quantized_loads_nothing(open_one, open_instance):
    p, d = open_one("prefill"), open_instance("decode")
    asked = decode(d, prompt_of(100), hand_over(p, prompt_of(100)))
    assert (asked.request.num_loaded, asked.request.miss_reason) == (0, "namespace")


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(200, 150), (64, 65), (10, 54)])
def test_the_next_turn_loads_the_prompt_and_the_answer(open_one, alone, num_prompt, num_answer):
    p, d = open_one("prefill"), open_one("decode")
    prompt = prompt_of(num_prompt)
    assert_next_turn_loads_the_answer_too(p, d, alone, prompt, num_answer, BLOCK)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_whatever_the_store_does(open_one, alone, monkeypatch, seed):
    """Errors, misses and flipped bits at random, requests of one prompt at once, and aborts."""
    assert_right_over_a_faulty_store(open_one, alone, monkeypatch, seed)


def test_what_is_read_is_within_half_a_step_of_what_was_written():
    """A token of zeros, as padding may be, stays one."""
    cache = PagedCache(1, 2, 16, 4, 8, torch.float32, "cpu", is_quantized=True)
    key, value = torch.randn(2, 10, 2, 16)
    value[3] = 0
    slots = torch.arange(20, 30)
    cache.write(0, slots, key, value)
    read = cache.read(0, torch.arange(4))
    assert not read[:20].any()
    assert not read[23, :, 16:].any()
    for written, got in zip((key, value), read[20:30].chunk(2, dim=-1), strict=True):
        step = written.abs().amax(dim=-1, keepdim=True) / 127
        assert ((got - written).abs() <= 0.51 * step).all()
