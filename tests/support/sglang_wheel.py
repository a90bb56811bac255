"""Makes SGLang's own classes importable from its wheel, or skips the module that imports this.

`make setup` downloads the wheel without its dependencies, and it is never unpacked. Empty modules
stand for the GPU's half and the platform checks; the storage interface, the loader of backends,
the host pools, the cache controllers, the server's context and what tells how arguments were
resolved are the wheel's. From 0.5.23 on they need msgspec. TEST_SGLANG_WHEELS names a directory
with another wheel, for which `make nightly` runs the same tests.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.left_out import find_in, leave_out

WHEELS = Path(os.environ.get("TEST_SGLANG_WHEELS") or Path(sys.prefix) / "wheels")


def _no(*_: object, **__: object) -> bool:
    return False


def _find() -> Path:
    wheels = sorted(WHEELS.glob("sglang-*.whl"))
    if not wheels:
        why = f"SGLang's wheel is not in {WHEELS}: make setup downloads it"
        pytest.skip(why, allow_module_level=True)
    return wheels[-1]


def _install(wheel: Path) -> None:
    find_in(wheel)
    checks = dict.fromkeys(("is_cuda", "is_hip", "is_npu", "is_xpu", "is_mps", "is_cpu"), _no)
    hicache = ("can_use_hicache_jit_kernel", "can_use_write_back_jit_kernel")
    given = {
        "sglang.kernels.ops.kvcache.hicache": dict.fromkeys(hicache, _no),
        "sglang.srt.utils": {**checks, "get_device_module": lambda: torch.cpu},
    }
    packages = [
        "kernels",
        "srt.utils",
        "srt.layers",
        "srt.distributed",
        "srt.mem_cache.memory_pool",
        "srt.disaggregation",
        "srt.observability",
    ]
    leave_out([f"sglang.{name}" for name in packages], given)


@contextlib.contextmanager
def _much_memory() -> Iterator[None]:
    """Lets SGLang import a psutil that sees a large host; others get the installed one, or none."""
    before = sys.modules.pop("psutil", None)
    memory = types.SimpleNamespace(available=1 << 40)
    sys.modules["psutil"] = stand_in = types.ModuleType("psutil")
    stand_in.virtual_memory = lambda: memory
    try:
        yield
    finally:
        del sys.modules["psutil"]
        if before is not None:
            sys.modules["psutil"] = before


WHEEL = _find()
_install(WHEEL)
with warnings.catch_warnings(), _much_memory():
    warnings.simplefilter("ignore")
    from sglang.srt import runtime_context
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

__all__ = ["StorageBackendFactory", "cache_controller", "hicache_storage", "runtime_context"]


def mha_pool(*, layout: str = "page_first", dtype: torch.dtype = torch.float16, heads: int = 2):
    """Returns SGLang's host pool for three layers: 16 pages of 64 tokens, filled at random."""
    shape = {"head_num": heads, "head_dim": 8, "v_head_dim": 8}
    if _takes_buffers(MHATokenToKVPoolHost):
        given = _captured("MHABufferInfo", dtype, heads, 8, **shape)
    else:
        given = {"device_pool": _device(dtype, heads, 8, **shape)}
    return _filled(MHATokenToKVPoolHost(**given, **_HOST, layout=layout))


def mla_pool(*, layout: str = "page_first"):
    """Returns the same for a model with MLA."""
    shape = {"kv_lora_rank": 12, "qk_rope_head_dim": 4}
    if _takes_buffers(MLATokenToKVPoolHost):
        layers = {"layer_indices": (0, 1, 2), "device_layer_num": 3, "kv_cache_dim": 16}
        given = _captured("MLABufferInfo", torch.float16, 1, 16, **shape, **layers)
        given["target_layer_num"] = 3
    else:
        given = {"device_pool": _device(torch.float16, 1, 16, **shape)}
    return _filled(MLATokenToKVPoolHost(**given, **_HOST, layout=layout))


_HOST = {"host_to_device_ratio": 1.0, "host_size": 0, "page_size": 64, "pin_memory": False}
_LAYERS = {"start_layer": 0, "end_layer": 3}


def _takes_buffers(kind: type) -> bool:
    """Tells whether a host pool is made of buffers of the device, as from 0.5.23 on."""
    return "buffer_info" in inspect.signature(kind).parameters


def _buffers(dtype: torch.dtype, heads: int, width: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(960, heads, width, dtype=dtype) for _ in range(3))


def _pointers(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64)


def _device(dtype: torch.dtype, heads: int, width: int, **shape: int) -> types.SimpleNamespace:
    """Returns what host pools up to 0.5.22 read of the pool on the device."""
    k, v = _buffers(dtype, heads, width), _buffers(dtype, heads, width)
    return types.SimpleNamespace(
        store_dtype=dtype,
        size=960,
        device="cpu",
        row_dim=heads * width,
        layer_num=3,
        layer_shard_enabled=False,
        **{"k_buffer": k, "k_data_ptrs": _pointers(k), "v_buffer": v, "v_data_ptrs": _pointers(v)},
        **{"kv_buffer": k, "data_ptrs": _pointers(k)},
        **_LAYERS,
        **shape,
    )


def _captured(
    name: str, dtype: torch.dtype, heads: int, width: int, **shape: object
) -> dict[str, object]:
    """Returns what makes a host pool from 0.5.23 on. name: SGLang's description of buffers."""
    from sglang.srt.mem_cache import device_pool_info as info

    k, v = _buffers(dtype, heads, width), _buffers(dtype, heads, width)
    pointers = {"k_data_ptrs": _pointers(k), "v_data_ptrs": _pointers(v)}
    both = info.KVBuffers(k=k, v=v, **pointers, layout=info.KVBufferLayout.NHD)
    own = (
        {"buffers": both} if name == "MHABufferInfo" else {"buffers": k, "data_ptrs": _pointers(k)}
    )
    device = torch.device("cpu")
    buffer_info = getattr(info, name)(**own, page_size=64, dtype=dtype, device=device, **shape)
    return {"buffer_info": buffer_info, "device_capacity_tokens": 960, **_LAYERS}


def _filled(pool):
    flat = pool.kv_buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
    return pool
