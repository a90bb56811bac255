"""Random checkpoints, engines, and transformers' own answers, for the mini engine's tests."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from dataclasses import dataclass, field

import pytest
import torch
import transformers

from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from examples.mini_engine.request import Finish, Request, Token
from examples.train_checkpoint import train_tokenizer
from pdstore import HandoffId, read_settings
from pdstore.testing.faulty import Faulty
from pdstore.worker import pool
from tests.support.kv import eventually

DEADLINE_S = 30
PULL = {"do_remote_decode": True}
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
SHAPES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, head_dim=16),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
    "mistral-window": lambda: transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=20),
}


def pd_of(role, store, **changes):
    """Returns settings of an instance whose switch is on."""
    pd = {"pd_transfer_via_storage": True, "role": role, "store": store, "staging": "8MiB"}
    return pd | changes


def make_checkpoints(make_directory):
    """Writes random checkpoints whose logits are far from flat; returns their paths by shape."""
    paths = {}
    for name, config in SHAPES.items():
        torch.manual_seed(1)
        paths[name] = make_directory(name)
        transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(paths[name])
        train_tokenizer(["some words for a tokenizer"], 270).save_pretrained(paths[name])
    return paths


@contextlib.contextmanager
def opening_engines(checkpoints):
    """Yields a function that makes engines; at the end they stop, with every block back."""
    with contextlib.ExitStack() as stack:

        def open_one(shape="llama", pd=None, **options):
            options = {"num_blocks": 64, "max_num_batched_tokens": 64, **options}
            settings = read_settings(**pd or {})
            engine = Engine(Config(model=checkpoints[shape], settings=settings, **options))
            stack.callback(close, engine)
            return engine

        yield open_one


def hand_over(p, prompt):
    """Lets P prefill a prompt. Returns the kv_transfer_params of its answer."""
    asked = ask(p, prompt, max_tokens=1, kv_transfer_params=PULL).wait()
    assert asked.finish == Finish("length")
    return asked.request.answer_params


def decode(d, prompt, params):
    return ask(d, prompt, kv_transfer_params=params).wait()


def close(engine):
    until(lambda: engine.cache.num_free == engine.cache.num_blocks or engine.error)
    engine.stop()
    assert engine.cache.num_free == engine.cache.num_blocks
    assert engine.cache.states is None or engine.cache.states.num_used == 0
    assert not engine.is_running


def until(condition):
    """Waits for something to become true, with a deadline."""
    eventually(condition, DEADLINE_S)


def until_stored(engine):
    """Waits until finished requests have left, and others can load what they saved."""
    until(lambda: not engine.scheduler.leaving)
    engine.adapter.pool.flush(DEADLINE_S)


@dataclass
class Asked:
    """A request and its answer so far."""

    request: Request
    events: queue.Queue
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def wait(self):
        while self.finish is None:
            event = self.events.get(timeout=DEADLINE_S)
            if isinstance(event, Token):
                self.ids.append(event.id)
                self.logprobs.append(event.logprob)
            else:
                self.finish = event
        return self


def ask(engine, prompt, max_tokens=8, **options):
    events = queue.Queue()
    request = Request(token_ids=prompt, max_tokens=max_tokens, sink=events.put, **options)
    engine.submit(request)
    return Asked(request, events)


def prompt_of(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(300, (num_tokens,), generator=generator).tolist()


def expect(path, prompt, max_tokens=8):
    """Returns the greedy ids and their logprobs by transformers itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logprobs = torch.stack(out.logits, dim=1)[0].log_softmax(-1)
    ids = out.sequences[0, len(prompt) :]
    return ids.tolist(), logprobs.gather(1, ids[:, None])[:, 0].tolist()


def assert_same(asked, ids, logprobs):
    assert asked.finish == Finish("length")
    assert asked.ids == ids
    assert asked.logprobs == pytest.approx(logprobs, abs=1e-3)


class Gate:
    """Holds an engine before each of its steps, to let them happen one by one."""

    def __init__(self, engine, monkeypatch):
        self._steps = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        forward = engine.model.forward

        def gated(*arguments):
            self.arrived.release()
            assert self._steps.acquire(timeout=DEADLINE_S)
            return forward(*arguments)

        monkeypatch.setattr(engine.model, "forward", gated)

    def wait_for_step(self):
        assert self.arrived.acquire(timeout=DEADLINE_S)

    def open(self, num_steps=10_000):
        self._steps.release(num_steps)


def assert_right_all_the_same(p, d, prompts, expected, choose: random.Random):
    """Asks for prompts over a pool that fails; some are not handed over, some are aborted.

    expected: for each prompt the ids and logprobs. Returns what was asked, after it has ended.
    """
    asked = []
    for _ in range(30):
        i = choose.randrange(len(prompts))
        params = hand_over(p, prompts[i]) if choose.random() < 0.8 else None
        asked.append((i, ask(d, prompts[i], kv_transfer_params=params)))
        if choose.random() < 0.2:
            d.abort(asked[-1][1].request)
    for i, one in asked:
        if one.wait().finish != Finish("abort"):
            assert_same(one, *expected[i])
    assert any(one.request.num_loaded for _, one in asked)
    return [one for _, one in asked]


def hand_over_at_once(p, d, prompt):
    """Asks P and D at once, as a router in concurrent mode does; returns D's answer."""
    params = {"pdstore": {"attempt": HandoffId.new().hex}}
    at_d = ask(d, prompt, kv_transfer_params=params)
    at_p = ask(p, prompt, max_tokens=1, kv_transfer_params={**PULL, **params})
    assert at_p.wait().finish == Finish("length")
    return at_d.wait()


def assert_next_turn_loads_the_answer_too(p, d, alone, prompt, num_answer, block_tokens):
    """P loads the whole blocks of a prompt and D's answer; D answers the turn as `alone` does."""
    first = ask(d, prompt, num_answer, kv_transfer_params=hand_over(p, prompt)).wait()
    until_stored(d)
    turn = prompt + first.ids + prompt_of(3)
    asked = ask(p, turn, max_tokens=1, kv_transfer_params=PULL).wait()
    num_known = len(prompt) + num_answer - 1
    assert asked.request.num_loaded == num_known // block_tokens * block_tokens
    expected = ask(alone, turn).wait()
    assert_same(decode(d, turn, asked.request.answer_params), expected.ids, expected.logprobs)


def assert_right_over_a_faulty_store(open_one, alone, monkeypatch, seed):
    """A pair answers as `alone` does over a store with errors, misses and flipped bits at random.

    open_one: opens an instance by its role, with options.
    """
    connect, choose = pool.connect_store, random.Random(seed)

    def connect_faulty(settings, metrics):
        store = Faulty(connect(settings, metrics))
        store.error_rate, store.miss_rate, store.corrupt_rate = 0.1, 0.1, 0.1
        return store

    monkeypatch.setattr(pool, "connect_store", connect_faulty)
    p, d = open_one("prefill", wait_s=0.2), open_one("decode", wait_s=0.2, num_blocks=48)
    prompts = [prompt_of(n, seed) for n in (3, 65, 100, 190)]
    answers = [ask(alone, prompt).wait() for prompt in prompts]
    expected = [(answer.ids, answer.logprobs) for answer in answers]
    assert_right_all_the_same(p, d, prompts, expected, choose)
