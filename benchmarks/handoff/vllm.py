"""A vLLM instance of the hand-off benchmark: stepped as `vllm serve` steps its engine."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.handoff.instance import Ask, Prompt
from benchmarks.handoff.recorder import now
from benchmarks.vllm_engine import Engine


@dataclass
class _Live:
    """A request that vLLM has not finished."""

    ask: Ask
    say: Callable[[str, str, Any], None]
    received: float
    times: list[float] = field(default_factory=list)


class VllmInstance:
    """One vLLM, whose engine is in this process.

    arguments: of `vllm.LLM`; `kv_transfer_config` turns pdstore on.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._engine = Engine(arguments)
        self._core = self._engine.core
        self._vocabulary = self._engine.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self._prompts: dict[Prompt, list[int]] = {}
        self._live: dict[str, _Live] = {}
        self._computed: Counter[str] = Counter()
        self._schedule = self._core.scheduler.schedule
        self._core.scheduler.schedule = self._counted_schedule
        for _ in range(2):
            self._engine.ask([7] * 1000, 4)
        self._engine.forget()

    def stage(self, prompt: Prompt) -> None:
        draw = random.Random(prompt.seed)
        ids = [draw.randrange(10, self._vocabulary) for _ in range(prompt.num_tokens)]
        self._prompts[prompt] = ids

    def submit(self, ask: Ask, say: Callable[[str, str, Any], None]) -> None:
        from vllm import SamplingParams

        received = now()
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=1 if ask.is_compared else None,
            skip_reading_prefix_cache=ask.skips_cache,
            extra_args={"kv_transfer_params": ask.params} if ask.params else None,
        )
        prompt = {"prompt_token_ids": self._prompts.pop(ask.prompt)}
        self._live[ask.name] = _Live(ask, say, received)
        self._engine.llm.llm_engine.add_request(ask.name, prompt, sampling)

    def step(self) -> bool:
        if self.is_idle():
            return False
        before = self._engine.num_scheduled
        for output in self._engine.llm.llm_engine.step():
            self._tell(output)
        if self._engine.num_scheduled == before:
            time.sleep(0.001)  # as vLLM's own loop does when nothing can be scheduled
        return True

    def is_idle(self) -> bool:
        return not (self._core.scheduler.has_requests() or self._core.batch_queue)

    def about(self) -> dict[str, Any]:
        return {"engine": "vllm", **self._engine.about()}

    def close(self) -> None:
        self._engine.close()

    def _tell(self, output: Any) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        tokens = list(output.outputs[0].token_ids) if output.outputs else []
        if len(tokens) > len(live.times):
            if not live.times:
                live.say("first", live.ask.name, now())
            live.times += [now()] * (len(tokens) - len(live.times))
        if output.finished and not live.times:
            raise RuntimeError(f"{live.ask.name} ended without a token: its load failed?")
        if output.finished:
            del self._live[output.request_id]
            live.say("done", live.ask.name, self._facts(live, output, tokens))

    def _facts(self, live: _Live, output: Any, tokens: list[int]) -> dict[str, Any]:
        num_computed = self._computed.pop(live.ask.name, 0) - (live.ask.max_tokens - 1)
        compared: dict[str, Any] = {}
        if live.ask.is_compared:
            pairs = zip(tokens, output.outputs[0].logprobs, strict=True)
            compared["prompt_ids"] = list(output.prompt_token_ids)
            compared["logprobs"] = [of_token[token].logprob for token, of_token in pairs]
        return compared | {
            "received": live.received,
            "times": live.times,
            "ids": tokens,
            "computed": num_computed,
            "loaded": output.num_cached_tokens,
            "reason": None,
            "handoff": output.kv_transfer_params,
            "error": None,
        }

    def _counted_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        for request_id, count in output.num_scheduled_tokens.items():
            name = request_id if request_id in self._live else request_id.rpartition("-")[0]
            self._computed[name] += count
        return output
