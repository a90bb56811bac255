"""The mini engine as an instance of the hand-off benchmark."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.handoff.instance import Ask, Prompt
from benchmarks.handoff.recorder import now

VOCABULARY = 32_000
PRELOAD = ("examples.mini_engine.engine", "transformers.models.llama.modeling_llama")
"""The modules that take seconds to import."""


class MiniInstance:
    """One mini engine, which steps in its own thread.

    settings: of pdstore; without a store the pool is off.
    """

    def __init__(
        self,
        model: str,
        settings: dict[str, Any],
        device: str,
        dtype: str,
        chunk: int,
        num_tokens: int,
        kv_tokens: int,
        max_seqs: int,
    ) -> None:
        from examples.mini_engine.config import Config
        from examples.mini_engine.engine import Engine
        from pdstore.settings import read_settings

        self._engine = Engine(
            Config(
                model=Path(model),
                settings=read_settings(pd_transfer_via_storage="store" in settings, **settings),
                num_blocks=kv_tokens // 16,
                block_size=16,
                max_num_seqs=max_seqs,
                max_num_batched_tokens=chunk,
                max_model_len=num_tokens + 64,
                device=device,
                dtype=dtype,
                threads=1,
            )
        )
        self._device, self._chunk = device, chunk
        self._prompts: dict[Prompt, list[int]] = {}
        self._warm_up()

    def stage(self, prompt: Prompt) -> None:
        draw = random.Random(prompt.seed)
        self._prompts[prompt] = [draw.randrange(10, VOCABULARY) for _ in range(prompt.num_tokens)]

    def submit(self, ask: Ask, say: Callable[[str, str, Any], None]) -> None:
        from examples.mini_engine.request import Finish, Request, Token

        prompt = self._prompts.pop(ask.prompt)
        times: list[float] = []
        received = now()

        def sink(event: Token | Finish) -> None:
            times.append(now())
            if isinstance(event, Token):
                if len(times) == 1:
                    say("first", ask.name, times[0])
                return
            facts = {
                "received": received,
                "times": times[:-1],
                "ids": request.output_ids,
                "computed": request.num_prefill_tokens,
                "loaded": request.num_loaded,
                "reason": request.miss_reason,
                "handoff": request.answer_params,
                "error": event.error,
            }
            say("done", ask.name, facts)

        request = Request(
            prompt, ask.max_tokens, sink, ignore_eos=True, kv_transfer_params=ask.params
        )
        self._engine.submit(request)

    def step(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return self._engine.cache.num_free == self._engine.cache.num_blocks

    def about(self) -> dict[str, Any]:
        import torch

        is_gpu = self._device.startswith("cuda")
        name = torch.cuda.get_device_name(self._device) if is_gpu else "cpu"
        return {"engine": "mini", "torch": torch.__version__, "device": name, "chunk": self._chunk}

    def close(self) -> None:
        self._engine.stop()

    def _warm_up(self) -> None:
        """Computes a chunk and some tokens, so that no request pays for what is made once."""
        from examples.mini_engine.request import Finish, Request, Token

        ended = threading.Event()

        def sink(event: Token | Finish) -> None:
            if isinstance(event, Finish):
                ended.set()

        for n in (self._chunk, 100):
            ended.clear()
            self._engine.submit(Request([n % 97] * n, 4, sink, ignore_eos=True))
            ended.wait(300)
