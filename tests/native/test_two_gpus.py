"""Engines pin their device: copies land there, and no other device is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pdstore.store.memory import MemoryStore
from tests.support.gpu_kit import gpu_instance, rig

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
pytestmark = [pytest.mark.cuda, needs_two]


@pytest.mark.requirement("R-DEV-4", "tests use a device that is not the default")
@pytest.mark.parametrize(("mine", "its"), [(0, 1), (1, 0)])
def test_copies_land_on_the_engines_device_whatever_the_callers_is(library, mine, its):
    """The caller's thread is back on its own device after each call."""
    torch.cuda.set_device(mine)
    case, swap, _host, copies = rig(library, device=f"cuda:{its}")
    swap.gather(copies)
    want = case.buffer.clone()
    case.buffer.zero_()
    torch.cuda.synchronize(its)
    swap.scatter(copies)
    assert torch.equal(case.buffer, want)
    assert torch.cuda.current_device() == mine
    store = MemoryStore()
    p = gpu_instance(store, device=f"cuda:{its}")
    keys = p.cache.keys(list(range(100)))
    assert p.pool.save(keys, list(range(7))).wait(20).num_tokens == 100
    assert p.pool.load(keys, list(range(20, 27))).wait(20).num_tokens == 100
    assert torch.equal(p.tokens(range(7))[:100], p.tokens(range(20, 27))[:100])
    assert torch.cuda.current_device() == mine
    p.close()
    torch.cuda.set_device(0)


@pytest.mark.requirement(
    "R-DEV-11, 12", "callers keep their device, and no other device gets a context"
)
def test_an_engine_of_device_1_makes_no_context_on_device_0(library):
    program = """
import sys
sys.path[:0] = sys.argv[1:]
import ctypes, mmap
import torch
from tests.support import native_kit
from tests.support.swap_case import layout_of
from pdstore.native.library import address_of
from pdstore.worker.swap.base import BlockCopy
from pdstore.worker.swap.native import NativeSwap
def active():
    driver = ctypes.CDLL("libcuda.so.1")
    flags, state = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(state)) == 0
    return state.value
library = native_kit.open_library()
layout = layout_of()
caches = [torch.empty(8, 16, 4, 128, dtype=torch.bfloat16, device="cuda:1") for _ in range(4)]
before = active()
swap = NativeSwap(library, layout, caches)
memory = memoryview(mmap.mmap(-1, 1 << 20))
swap.register(address_of(memory), len(memory))
part = layout.parts[0]
swap.gather([BlockCopy(part, [0, 1], 32, 0, memory[: layout.payload_bytes(part, 32)])])
swap.close()
swap.unregister(address_of(memory))
print(before, active())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *sys.path], capture_output=True, text=True, timeout=100
    )
    if done.stdout.startswith("1"):
        pytest.skip("torch has made one already")
    assert done.stdout.split() == ["0", "0"], done.stderr
