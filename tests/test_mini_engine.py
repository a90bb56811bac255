"""The mini engine gives the answers of transformers, however it batches, chunks or loads."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from examples.make_checkpoint import train_tokenizer  # noqa: E402
from examples.mini_engine.config import Config  # noqa: E402
from examples.mini_engine.engine import Engine, EngineError  # noqa: E402
from examples.mini_engine.request import Finish, Request, Token  # noqa: E402
from pdstore import read_settings  # noqa: E402
from pdstore.errors import ConfigError  # noqa: E402

DEADLINE_S = 30
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
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
SHAPES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, head_dim=16),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
    "mistral-window": lambda: transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=20),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Random checkpoints whose logits are far from flat, by shape."""
    paths = {}
    for name, config in SHAPES.items():
        torch.manual_seed(1)
        paths[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(paths[name])
        train_tokenizer(["some words for a tokenizer"], 270).save_pretrained(paths[name])
    return paths


@pytest.fixture
def open_engine(checkpoints):
    """Makes engines; at the end they stop, and every block must have come back."""
    with contextlib.ExitStack() as stack:

        def open_one(shape="llama", pd=None, **options):
            options = {"num_blocks": 64, "max_num_batched_tokens": 64, **options}
            settings = read_settings(**pd or {})
            engine = Engine(Config(model=checkpoints[shape], settings=settings, **options))
            stack.callback(close, engine)
            return engine

        yield open_one


def close(engine):
    until(lambda: engine.cache.num_free == engine.cache.num_blocks or engine.error)
    engine.stop()
    assert engine.cache.num_free == engine.cache.num_blocks
    assert not engine._thread.is_alive()


def until(condition):
    """Waits for something to become true, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


@dataclass
class Asked:
    """A request, and what came of it."""

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
    request = Request(prompt=prompt, max_tokens=max_tokens, sink=events.put, **options)
    engine.submit(request)
    return Asked(request, events)


def prompt_of(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(300, (num_tokens,), generator=generator).tolist()


def expect(path, prompt, max_tokens=8):
    """The greedy ids and their logprobs by transformers itself."""
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
    """Stops an engine before its steps, to let them happen one by one."""

    def __init__(self, engine, monkeypatch):
        self._steps = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        forward = engine.model.forward

        def gated(chunks, cache):
            self.arrived.release()
            assert self._steps.acquire(timeout=DEADLINE_S)
            return forward(chunks, cache)

        monkeypatch.setattr(engine.model, "forward", gated)

    def wait_for_step(self):
        assert self.arrived.acquire(timeout=DEADLINE_S)

    def open(self, num_steps=10_000):
        self._steps.release(num_steps)


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
        assert asked.request.num_fed == len(prompt)


def test_the_reference_is_not_flat(checkpoints):
    """Else equal ids would prove nothing: another prompt must give another answer."""
    answers = {tuple(expect(checkpoints["llama"], prompt_of(40, seed))[0]) for seed in range(4)}
    assert len(answers) == 4


def test_more_requests_than_blocks_wait_for_their_turn(open_engine, checkpoints):
    engine = open_engine(num_blocks=4)
    prompts = [prompt_of(40, seed) for seed in range(6)]
    asked = [ask(engine, prompt) for prompt in prompts]
    for prompt, one in zip(prompts, asked, strict=True):
        assert_same(one.wait(), *expect(checkpoints["llama"], prompt))


def test_a_small_budget_serves_more_answers_than_fit_in_one_step(open_engine, checkpoints):
    engine = open_engine(max_num_batched_tokens=3)
    prompts = [prompt_of(5, seed) for seed in range(8)]
    for prompt, one in zip(prompts, [ask(engine, p) for p in prompts], strict=True):
        assert_same(one.wait(), *expect(checkpoints["llama"], prompt))


def test_the_end_token_ends_an_answer_unless_ignored(open_engine):
    engine = open_engine()
    ids = ask(engine, prompt_of(20)).wait().ids
    engine.model.end_ids = frozenset({ids[2]})
    first = ids.index(ids[2])
    stopped = ask(engine, prompt_of(20)).wait()
    assert (stopped.ids, stopped.finish) == (ids[: first + 1], Finish("stop"))
    assert ask(engine, prompt_of(20), ignore_eos=True).wait().ids == ids


def test_top_logprobs_begin_with_the_chosen_token(open_engine):
    engine = open_engine()
    asked = ask(engine, prompt_of(9), max_tokens=1, num_logprobs=3)
    token = asked.events.get(timeout=DEADLINE_S)
    assert token.top[0] == (token.id, token.logprob)
    assert [logprob for _, logprob in token.top] == sorted((p for _, p in token.top), reverse=True)
    assert len(token.top) == 3


def test_a_request_can_be_aborted_while_it_waits(open_engine, monkeypatch):
    engine = open_engine(max_num_seqs=1)
    gate = Gate(engine, monkeypatch)
    running, waiting = ask(engine, prompt_of(5)), ask(engine, prompt_of(6))
    gate.wait_for_step()
    engine.abort(waiting.request)
    gate.open()
    assert waiting.wait().finish == Finish("abort")
    assert running.wait().finish == Finish("length")


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


def test_a_failed_step_ends_its_requests_and_not_the_engine(open_engine, monkeypatch, checkpoints):
    engine = open_engine()

    def fail(chunks, cache):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", fail)
        finish = ask(engine, prompt_of(9)).wait().finish
    assert finish.reason == "error"
    assert "out of luck" in finish.error
    assert_same(ask(engine, prompt_of(9)).wait(), *expect(checkpoints["llama"], prompt_of(9)))


def test_a_dead_loop_ends_every_request_and_refuses_new_ones(open_engine, monkeypatch):
    engine = open_engine(max_num_seqs=1)
    gate = Gate(engine, monkeypatch)
    asked = [ask(engine, prompt_of(5)), ask(engine, prompt_of(6))]
    gate.wait_for_step()
    monkeypatch.setattr(engine.scheduler, "advance", lambda: 1 / 0)
    gate.open()
    assert [one.wait().finish.reason for one in asked] == ["error", "error"]
    assert "ZeroDivisionError" in asked[0].finish.error
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        ask(engine, prompt_of(5))
    engine.cache.free(asked[0].request.block_ids)  # nobody else will


def test_stop_ends_what_runs(open_engine, monkeypatch):
    engine = open_engine()
    asked = ask(engine, prompt_of(5), max_tokens=400)
    asked.events.get(timeout=DEADLINE_S)
    engine.stop()
    assert asked.wait().finish == Finish("abort")
    assert engine.cache.num_free == engine.cache.num_blocks


def test_without_the_switch_there_is_no_adapter_and_nothing_is_counted(open_engine):
    engine = open_engine()
    ask(engine, prompt_of(5)).wait()
    assert engine.adapter is None
    assert engine.counters.computed._value.get() == 5 + 7
    samples = [sample for m in engine.counters.registry.collect() for sample in m.samples]
    assert not [s for s in samples if s.name.startswith("pdstore_") and s.name.endswith("_total")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"rope_parameters": DYNAMIC}, "dynamic"),
    ],
)
def test_a_checkpoint_that_cannot_be_paged_is_refused(
    open_engine, checkpoints, tmp_path, monkeypatch, change, words
):
    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    monkeypatch.setitem(checkpoints, "odd", tmp_path)
    with pytest.raises(ConfigError, match=words):
        open_engine("odd")


def test_a_context_over_the_models_is_refused(open_engine):
    with pytest.raises(ConfigError, match="512"):
        open_engine(max_model_len=513)


def test_a_missing_device_is_refused(open_engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda"):
        open_engine(device="cuda")
