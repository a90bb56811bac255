"""One vLLM instance in a process of its own, which does what it is told over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import vllm_ranks

Answer = dict[str, Any]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    # No NVLink multicast: the GPUs of a host may belong to several guests.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}


class Engine:
    """One vLLM instance, in a process of its own, driven step by step."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        _scale_what_is_loaded(DummyModelLoader)
        began = time.perf_counter()
        try:
            self.llm = LLM(**arguments)
        except Exception:
            if arguments.get("enforce_eager"):
                raise
            traceback.print_exc()  # then without CUDA graphs
            del arguments["compilation_config"]
            self.llm = LLM(**arguments | {"enforce_eager": True})
        self.seconds_to_start = time.perf_counter() - began
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.num_scheduled = 0
        self._schedule = self.core.scheduler.schedule
        self.core.scheduler.schedule = self._counted_schedule

    def about(self) -> dict[str, Any]:
        import torch
        import vllm

        config = self.llm.llm_engine.vllm_config
        caches = self.core.scheduler.kv_cache_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "seconds_to_start": self.seconds_to_start,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "runner_v2": bool(config.use_v2_model_runner),
            "blocks": caches.num_blocks,
            "block_tokens": config.cache_config.block_size,
            "weights": self._ranks(vllm_ranks.digest_of_weights),
        }

    def ask(
        self, prompt: list[int], max_tokens: int, params: Any = None, logprobs: int = 5
    ) -> Answer:
        """Asks for a prompt and steps until its answer is whole.

        params: the request's kv_transfer_params. logprobs: of how many tokens, at each place.
        """
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        )
        before, counters = self.num_scheduled, self.counters()
        began = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        said = output.outputs[0]
        return {
            "seconds": seconds,
            "computed": self.num_scheduled - before - (max_tokens - 1),
            "cached": output.num_cached_tokens,
            "ids": list(said.token_ids),
            "logprobs": [
                {str(token): value.logprob for token, value in of_one.items()}
                for of_one in said.logprobs or ()
            ],
            "handoff": output.kv_transfer_params,
            "counters": _difference(counters, self.counters()),
        }

    def settle(self) -> float:
        """Steps until the connector has nothing left to do. Returns the seconds that this took."""
        began = time.perf_counter()
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.llm.llm_engine.step()
            if time.perf_counter() - began > 60:
                raise TimeoutError("the connector still has work to do")
        return time.perf_counter() - began

    def forget(self) -> bool:
        """Empties vLLM's own prefix cache."""
        self.settle()
        until = time.perf_counter() + 20
        while not self.llm.reset_prefix_cache():
            if time.perf_counter() > until:
                return False
            time.sleep(0.05)
        return True

    def counters(self) -> dict[str, float]:
        """Returns the counters of both sides of pdstore's connector; over the ranks, their sums."""
        found = Counter(vllm_ranks.counters_of(self.core.scheduler.get_kv_connector()))
        for each in self._ranks(vllm_ranks.worker_counters):
            found.update(each)
        return dict(found)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _ranks(self, function: Callable[[Any], Any]) -> list[Any]:
        """Calls a function in each rank's worker; returns the answers."""
        return list(self.core.model_executor.collective_rpc(function))

    def _counted_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        self.num_scheduled += output.total_num_scheduled_tokens
        return output


def _scale_what_is_loaded(loader: Any) -> None:
    """Makes vLLM scale its dummy weights: products as large as their inputs, uneven attention."""
    load = loader.load_weights

    def load_scaled(self: Any, model: Any, model_config: Any) -> None:
        load(self, model, model_config)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.data.fill_(1.0)
            else:  # they are even between -1/1000 and 1/1000
                weight.data.mul_(1000.0 * (3.0 / weight.shape[-1]) ** 0.5)
            if name.endswith("qkv_proj.weight"):  # rows of q, of k, of v
                weight.data[: weight.shape[0] * 5 // 6].mul_(2.0)

    loader.load_weights = load_scaled


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)}


def serve(pipe: Connection, log: str, environment: dict[str, str], arguments: Any) -> None:
    """Runs in an instance's process: makes an Engine, and calls what it is told to."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)  # nothing has imported torch yet
    try:
        engine = Engine(arguments)
        pipe.send(("ok", engine.about()))
        while (call := pipe.recv()) is not None:
            verb, args = call
            try:
                pipe.send(("ok", getattr(engine, verb)(*args)))
            except Exception:
                traceback.print_exc()
                pipe.send(("error", traceback.format_exc()))
        with contextlib.suppress(Exception):
            engine.close()
    except Exception:
        traceback.print_exc()
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)


class Instance:
    """The driver's end of an instance's process: calls of it are calls of its Engine.

    seconds_left: how long an answer may take at most.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        environment: dict[str, str],
        arguments: dict[str, Any],
        seconds_left: Callable[[], float],
    ) -> None:
        self.name, self.log, self._seconds_left = name, log, seconds_left
        self.started: Answer = {}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(theirs, str(self.log), ENVIRONMENT | environment, arguments),
            daemon=False,
        )
        self._process.start()
        theirs.close()

    def start(self, seconds: float) -> Answer:
        """Waits until it is up, `seconds` at most. Returns what it says about itself."""
        self.started = self.answer(seconds)
        return self.started

    def answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{self.name} said nothing for {seconds:.0f} s: {self.tail()}")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended: {self.tail()}") from None
        if kind == "error":
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._pipe.send((verb, args))
            return self.answer(min(60.0, max(5.0, self._seconds_left())))

        return call

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-3000:]
        return ""

    def dismiss(self) -> None:
        """Tells the process to end; `stop` waits for it."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def stop(self) -> None:
        self._process.join(12)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
