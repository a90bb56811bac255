"""Measures the CPU time of a step of vLLM's scheduler while 8 requests decode.

    python -m benchmarks.vllm_steps DIR

Prints one line of JSON. With the connector on, it has nothing to do in these steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT

_REQUESTS, _TOKENS, _DECODED = 8, 200, 300


def main() -> None:
    for name, value in (CPU_ENVIRONMENT | ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="float32",
        block_size=64,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=_REQUESTS,
        num_gpu_blocks_override=256,
    )
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    seconds: list[float] = []
    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, _timed(getattr(scheduler, name), seconds))
    sampling = SamplingParams(temperature=0, max_tokens=_DECODED, ignore_eos=True)
    prompts = [{"prompt_token_ids": [i] * _TOKENS} for i in range(_REQUESTS)]
    llm.generate(prompts, sampling, use_tqdm=False)
    steps = [a + b for a, b in zip(seconds[::2], seconds[1::2], strict=False)]
    steady = steps[len(steps) // 3 :]  # prompts and their saves are over
    result = {
        "steps": len(steady),
        "median_us": round(1e6 * statistics.median(steady), 1),
        "mean_us": round(1e6 * statistics.fmean(steady), 1),
    }
    print(json.dumps(result))


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        result = function(*args, **kwargs)
        seconds.append(time.thread_time() - begin)
        return result

    return timed


if __name__ == "__main__":
    main()
