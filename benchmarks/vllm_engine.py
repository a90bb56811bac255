"""vLLM with dummy weights, driven step by step in this process."""

from __future__ import annotations

import hashlib
import time
import traceback
from typing import Any

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


def digest_of_weights(worker: Any) -> str:
    import torch

    model = getattr(worker, "worker", worker).model_runner.model
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        bits = weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])
        digest.update(f"{name} {int(bits.sum(dtype=torch.int64))}\n".encode())
    return digest.hexdigest()[:16]


class Engine:
    """One vLLM instance.

    arguments: of `vllm.LLM`. Without `enforce_eager`, an instance that cannot capture CUDA graphs
      starts again without them.
    """

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
            "weights": list(self.core.model_executor.collective_rpc(digest_of_weights)),
        }

    def ask(self, prompt: list[int], max_tokens: int) -> None:
        """Asks for a prompt and steps until its answer is whole."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)

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

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

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
            if name.endswith("A_log"):  # a state forgets a twentieth at each token
                weight.data.fill_(-3.0)
            elif weight.dim() == 1:
                weight.data.fill_(1.0)
            else:  # they are even between -1/1000 and 1/1000
                weight.data.mul_(1000.0 * (3.0 / weight.shape[-1]) ** 0.5)
            if name.endswith("qkv_proj.weight"):  # rows of q, of k, of v
                weight.data[: weight.shape[0] * 5 // 6].mul_(2.0)
            if name.endswith(
                "q_b_proj.weight"
            ):  # few tokens count, so a wrong choice of them shows
                weight.data.mul_(3.0)

    loader.load_weights = load_scaled
