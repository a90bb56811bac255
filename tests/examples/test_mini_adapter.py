"""D loads what P saved, computes one token and answers as P would, whatever the pool does.

Then the next turn, of which P loads what D decoded, and PDSTORE_LOAD.
"""

from __future__ import annotations

import random

import pytest
import torch

from examples.mini_engine.answer import Answer
from examples.mini_engine.protocol import Body
from examples.mini_engine.request import Finish, Request, State
from pdstore import HandoffId, Reason, open_store, read_settings
from pdstore.store import Slots
from pdstore.testing.faulty import Faulty
from pdstore.worker import pool
from pdstore.worker.values import BlockRange, PromptBlocks
from tests.support.kv import parsed_handoffs
from tests.support.mini_engine_kit import (
    DEADLINE_S,
    PULL,
    SHAPES,
    Gate,
    ask,
    assert_right_all_the_same,
    assert_same,
    decode,
    expect,
    hand_over,
    pd_of,
    prompt_of,
    until,
    until_stored,
)

BLOCK = 64
SLOW = "bytes_per_s=400KB&error_rate=0&miss_rate=0&corrupt_rate=0"
TOKENS = 200  # 100 KB of KV: a quarter of a second of that store


def stored(engine, prompt):
    """Returns the values of a prompt that the pool may hold."""
    keys = engine.adapter.cache.keys(prompt)
    prompt = PromptBlocks(engine.adapter.pool.layout, keys, [range(64)])
    return prompt.values(BlockRange(0, len(keys)))


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_d_computes_one_token_and_answers_the_same(open_instance, checkpoints, shape):
    p, d = open_instance("prefill", shape), open_instance("decode", shape)
    for num_tokens in (1, 5, 16, 63, 64, 65, 128, 200):
        prompt = prompt_of(num_tokens)
        asked = decode(d, prompt, hand_over(p, prompt))
        assert_same(asked, *expect(checkpoints[shape], prompt))
        assert (asked.request.num_loaded, asked.request.num_prefill_tokens) == (num_tokens - 1, 1)
        assert asked.request.miss_reason is None


def test_d_loads_what_p_has_saved_while_p_computes_the_rest(
    open_instance, checkpoints, monkeypatch
):
    p, d = open_instance("prefill", max_num_batched_tokens=64), open_instance("decode")
    prompt, params = prompt_of(150), {"pdstore": {"attempt": HandoffId.new().hex}}
    gate = Gate(p, monkeypatch)
    at_p = ask(p, prompt, max_tokens=1, kv_transfer_params={**PULL, **params})
    at_d = ask(d, prompt, kv_transfer_params=params)
    gate.wait_for_step()
    gate.open(1)
    gate.wait_for_step()
    until(lambda: at_d.request.block_ids)
    fourth = at_d.request.block_ids[3]
    until(lambda: all(layer[fourth].any() for layer in d.cache.layers))
    assert at_d.request.state is State.LOADING
    gate.open()
    assert at_p.wait().finish == Finish("length")
    assert_same(at_d.wait(), *expect(checkpoints["llama"], prompt))
    assert (at_d.request.num_loaded, at_d.request.num_prefill_tokens) == (149, 1)


@pytest.mark.requirement(
    "R-AW-8, 9", "a forward that fails ends its saves, and the next step works"
)
def test_a_step_that_fails_cancels_its_saves(open_instance, monkeypatch):
    p = open_instance("prefill")
    forward, begun = p.model.forward, []
    begin_save = p.adapter.pool.begin_save

    def begin(*arguments, **options):
        begun.append(begin_save(*arguments, **options))
        return begun[-1]

    def fail(chunks, cache, layer_written):
        forward(chunks, cache, lambda layer: layer_written(0))
        raise RuntimeError("out of luck")

    monkeypatch.setattr(p.adapter.pool, "begin_save", begin)
    monkeypatch.setattr(p.model, "forward", fail)
    assert ask(p, prompt_of(64), kv_transfer_params=PULL).wait().finish.reason == "error"
    assert [save.job.wait(5).reason for save in begun] == [Reason.CANCELLED]


def test_kv_transfer_params_are_parsed_once_a_request(open_instance, monkeypatch):
    p, d = open_instance("prefill"), open_instance("decode")
    params, parsed = hand_over(p, prompt_of(100)), parsed_handoffs(monkeypatch)
    for engine in (p, d):
        asked = Request(prompt_of(100), 1, lambda event: None, kv_transfer_params=params)
        engine.check(asked)
        engine.adapter.look_up(asked)
        engine.adapter.end(asked)
    assert parsed == [params, params]


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_a_hand_off_whose_save_cannot_begin_is_told_to_d_at_once(
    open_instance, checkpoints, monkeypatch, is_concurrent
):
    p, d = open_instance("prefill"), open_instance("decode", wait_s=DEADLINE_S)
    params = {"pdstore": {"attempt": HandoffId.new().hex}} if is_concurrent else {}
    monkeypatch.setattr(p.adapter.pool, "begin_save", None)
    at_p = ask(p, prompt_of(100), max_tokens=1, kv_transfer_params={**PULL, **params}).wait()
    asked = decode(d, prompt_of(100), params or at_p.request.answer_params)
    assert_same(asked, *expect(checkpoints["llama"], prompt_of(100)))
    assert asked.request.miss_reason == "handoff_failed"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_answers_and_hand_offs_are_those_of_the_cpu(open_instance, checkpoints, shape):
    options = {"device": "cuda", "max_num_batched_tokens": 100}
    p, d = open_instance("prefill", shape, **options), open_instance("decode", shape, **options)
    prompts = [prompt_of(n) for n in (1, 64, 150, 200)]
    params = [hand_over(p, prompt) for prompt in prompts]
    asked = [ask(d, prompts[i], kv_transfer_params=params[i]) for i in range(4)]
    for prompt, one in zip(prompts, asked, strict=True):
        assert_same(one.wait(), *expect(checkpoints[shape], prompt))
        assert one.request.num_prefill_tokens == 1


def test_one_engine_of_both_roles_publishes_only_when_asked(open_instance, checkpoints):
    engine = open_instance("both")
    first = ask(engine, prompt_of(100)).wait()
    assert first.request.answer_params is None
    until_stored(engine)
    second = ask(engine, prompt_of(100)).wait()
    assert_same(second, *expect(checkpoints["llama"], prompt_of(100)))
    assert second.request.num_prefill_tokens == 100 % 64, "without a hand-off no tail is saved"
    params = hand_over(engine, prompt_of(90))
    assert decode(engine, prompt_of(90), params).request.num_prefill_tokens == 1


def remove(url, values):
    store = open_store(url, read_settings(store=url))
    store.remove(values.keys)
    store.close()


def flip_a_bit(url, values):
    """Of the last byte of a stored value: of a V in its payload."""
    store = open_store(url, read_settings(store=url))
    [size] = values.sizes
    buffer = bytearray(size)
    slots = Slots(memoryview(buffer), size, [0], [size])
    assert store.get(values.keys, slots) == 1
    buffer[-1] ^= 1
    store.remove(values.keys)
    assert store.put(values.keys, slots) == 1
    store.close()


@pytest.mark.parametrize(
    ("damage", "num_loaded", "reason"), [(remove, 64, "absent"), (flip_a_bit, 64, "corrupt")]
)
def test_a_lost_or_corrupt_value_is_computed(
    open_instance, checkpoints, url, damage, num_loaded, reason
):
    p, d = open_instance("prefill"), open_instance("decode")
    params = hand_over(p, prompt_of(150))
    until_stored(p)
    damage(url, stored(p, prompt_of(150))[1:2])
    asked = decode(d, prompt_of(150), params)
    assert_same(asked, *expect(checkpoints["llama"], prompt_of(150)))
    assert (asked.request.num_loaded, asked.request.num_prefill_tokens) == (
        num_loaded,
        150 - num_loaded,
    )
    assert asked.request.miss_reason == reason


@pytest.fixture
def held(monkeypatch):
    """A store around the pool's, in the workers' half only, whose calls a test can hold up."""
    stores = []
    connect = pool.connect_store

    def connect_held(settings, metrics):
        stores.append(Faulty(connect(settings, metrics)))
        return stores[-1]

    monkeypatch.setattr(pool, "connect_store", connect_held)
    yield stores
    for store in stores:
        store.release()


@pytest.mark.requirement(
    "R-AW-10, R11, R20", "the engine's thread never waits for a copy or the store"
)
def test_a_save_does_not_delay_the_answer_and_keeps_its_blocks(open_instance, held):
    p, d = open_instance("prefill"), open_instance("decode")
    held[0].hold()
    params = hand_over(p, prompt_of(100))
    assert p.cache.num_free == p.cache.num_blocks - 7
    held[0].release()
    assert decode(d, prompt_of(100), params).request.num_prefill_tokens == 1


@pytest.mark.parametrize("half", ["cache", "pool"])
@pytest.mark.parametrize("on_miss", ["compute", "fail"])
def test_a_bug_in_the_pool_costs_hits_or_the_handed_over_request(
    open_instance, checkpoints, monkeypatch, half, on_miss
):
    p, d = open_instance("prefill"), open_instance("decode", pd={"on_miss": on_miss})
    params = hand_over(p, prompt_of(100))
    monkeypatch.setattr(d.adapter, half, None)
    asked = decode(d, prompt_of(100), params)
    if on_miss == "fail":
        assert asked.finish == Finish("error", "the hand-off fell short: fault", "fault")
    else:
        assert_same(asked, *expect(checkpoints["llama"], prompt_of(100)))
        assert asked.request.miss_reason == "fault"
    monkeypatch.undo()


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_whatever_the_store_does(open_instance, held, checkpoints, seed):
    """Errors, misses and flipped bits at random, requests of one prompt at once, and aborts."""
    choose = random.Random(seed)
    p = open_instance("prefill", wait_s=0.2)
    d = open_instance("decode", wait_s=0.2, num_blocks=48)
    for store in held:
        store.error_rate, store.miss_rate, store.corrupt_rate = 0.1, 0.1, 0.1
    prompts = [prompt_of(n, seed) for n in (3, 64, 100, 190)]
    expected = [expect(checkpoints["llama"], prompt) for prompt in prompts]
    asked = assert_right_all_the_same(p, d, prompts, expected, choose)
    assert {one.finish.reason for one in asked} <= {"length", "abort"}


@pytest.mark.requirement(
    "C1",
    "a decoded block is saved only when all of its KV is computed",
    note="also if prompt and answer together are whole blocks",
)
@pytest.mark.parametrize(("num_prompt", "num_answer"), [(200, 150), (64, 65), (10, 54), (63, 2)])
def test_the_next_turn_loads_the_prompt_and_the_answer_on_p(
    open_instance, checkpoints, num_prompt, num_answer
):
    p, d = open_instance("prefill"), open_instance("decode")
    prompt = prompt_of(num_prompt)
    first = ask(d, prompt, num_answer, kv_transfer_params=hand_over(p, prompt)).wait()
    assert_same(first, *expect(checkpoints["llama"], prompt, num_answer))
    until_stored(d)
    turn = prompt + first.ids + prompt_of(3)
    asked = ask(p, turn, max_tokens=1, kv_transfer_params=PULL).wait()
    # The last token of an answer is never computed in its own turn.
    whole_blocks = (num_prompt + num_answer - 1) // BLOCK * BLOCK
    assert asked.request.num_loaded == whole_blocks
    assert asked.request.num_prefill_tokens == len(turn) - whole_blocks
    second = decode(d, turn, asked.request.answer_params)
    assert_same(second, *expect(checkpoints["llama"], turn))
    assert second.request.num_prefill_tokens == 1


def test_what_d_had_to_compute_is_saved_with_the_answer(open_instance):
    d, p = open_instance("decode"), open_instance("prefill")
    prompt = prompt_of(100)
    first = ask(d, prompt, 100).wait()
    assert first.request.num_loaded == 0
    until_stored(d)
    asked = ask(p, prompt + first.ids, max_tokens=1).wait()
    assert asked.request.num_loaded == 192


def decided(p, d, first, num_tokens=TOKENS):
    """Hands a prompt from P to D, once P has stored all of it, and returns D's request."""
    prompt = [first, *prompt_of(num_tokens)[1:]]
    params = hand_over(p, prompt)
    until_stored(p)  # what follows P is loaded
    asked = decode(d, prompt, params)
    assert asked.ids == ask(p, prompt).wait().ids
    return asked.request


@pytest.mark.parametrize(("load", "num_loaded"), [("always", TOKENS - 1), ("never", 0)])
def test_always_loads_and_never_computes(open_engine, load, num_loaded):
    p = open_engine(pd=pd_of("prefill", f"memory://decide-{load}"))
    d = open_engine(pd=pd_of("decode", f"memory://decide-{load}", load=load))
    request = decided(p, d, 1)
    assert request.num_loaded == num_loaded
    assert request.decided.get("decision") == (None if load == "always" else "compute")


def test_auto_computes_once_it_knows_that_the_store_is_slow(open_engine):
    p = open_engine(pd=pd_of("prefill", "memory://decide-slow"))
    url = f"faulty+memory://decide-slow?{SLOW}"
    d = open_engine(pd=pd_of("decode", url, load="auto", deadline_s=30.0))
    requests = [decided(p, d, first, 4 * TOKENS) for first in range(1, 5)]
    said = [request.decided["decision"] for request in requests]
    assert said[:2] == ["load", "load"]
    assert (said[-1], requests[-1].num_loaded) == ("compute", 0)
    answer = Answer(d.model.tokenizer, "m", Body(prompt=requests[-1].prompt), requests[-1])
    assert answer.end("length")[-1].usage.pdstore["decision"] == "compute"
    value = d.counters.registry.get_sample_value
    assert value("pdstore_decisions_total", {"way": "compute"}) >= 1
