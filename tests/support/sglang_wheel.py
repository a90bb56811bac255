"""Makes SGLang's own classes importable from its wheel, or skips the module that imports this.

`make setup` downloads the wheel without its dependencies, and it is never unpacked. Empty modules
stand for the GPU's half and the platform checks; the storage interface, the loader of backends,
the host pools, the cache controller and the server's context are the wheel's.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

WHEELS = Path(os.environ.get("TEST_SGLANG_WHEELS") or Path(sys.prefix) / "wheels")


class _DevicePool:
    """Stands for the classes of SGLang's pools on the device, which the host pools name."""


def _left_out(name: str, **content: object) -> None:
    """Puts a module in the place of one that is left out; any other name in it is None."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda attribute: _refuse(attribute)
    vars(module).update(content)
    sys.modules[name] = module


def _refuse(attribute: str) -> None:
    if attribute.startswith("__"):
        raise AttributeError(attribute)


def _no(*_: object) -> bool:
    return False


def _find() -> Path:
    wheels = sorted(WHEELS.glob("sglang-*.whl"))
    if not wheels:
        why = f"SGLang's wheel is not in {WHEELS}: make setup downloads it"
        pytest.skip(why, allow_module_level=True)
    return wheels[-1]


def _install(wheel: Path) -> None:
    sglang = types.ModuleType("sglang")  # its own __init__ imports the whole engine
    sglang.__path__ = [f"{wheel}/sglang"]
    sglang.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    sys.modules["sglang"] = sglang
    pools = ("KVCache", "MHATokenToKVPool", "MHATokenToKOnlyPool", "MLATokenToKVPool")
    _left_out("sglang.srt.mem_cache.memory_pool", **dict.fromkeys(pools, _DevicePool))
    for name in ("", ".ops", ".ops.kvcache", ".ops.kvcache.hicache"):
        _left_out(f"sglang.kernels{name}", can_use_hicache_jit_kernel=_no)
    checks = ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_mps")
    _left_out("sglang.srt.utils", **dict.fromkeys(checks, _no), get_device_module=lambda: torch.cpu)
    for name in ("layers", "layers.dp_attention"):
        _left_out(f"sglang.srt.{name}")
    memory = types.SimpleNamespace(available=1 << 40)
    _left_out("psutil", virtual_memory=lambda: memory)


WHEEL = _find()
_install(WHEEL)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt import runtime_context
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
del sys.modules["psutil"]  # others may ask whether it is installed

__all__ = ["StorageBackendFactory", "cache_controller", "hicache_storage", "runtime_context"]


def mha_pool(*, layout: str = "page_first", dtype: torch.dtype = torch.float16, heads: int = 2):
    """Returns SGLang's host pool for three layers: 16 pages of 64 tokens, filled at random."""
    device = types.SimpleNamespace(
        **_shape(dtype), head_num=heads, head_dim=8, layer_shard_enabled=False
    )
    pool = MHATokenToKVPoolHost(device, 1.0, 0, 64, layout, pin_memory=False)
    return _filled(pool)


def mla_pool(*, layout: str = "page_first"):
    """Returns the same for a model with MLA."""
    device = types.SimpleNamespace(
        **_shape(torch.float16), kv_lora_rank=12, qk_rope_head_dim=4, layer_shard_enabled=False
    )
    pool = MLATokenToKVPoolHost(device, 1.0, 0, 64, layout, pin_memory=False)
    return _filled(pool)


def _shape(dtype: torch.dtype) -> dict[str, object]:
    layers = {"layer_num": 3, "start_layer": 0, "end_layer": 3}
    return {"store_dtype": dtype, "size": 960, "device": "cpu", **layers}


def _filled(pool):
    flat = pool.kv_buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
    return pool
