"""Caches, swaps and pool instances on a GPU, for tests."""

from __future__ import annotations

import torch

from pdstore.format.identity import LayerSpec
from pdstore.native.library import CopyPath, address_of
from pdstore.worker.swap.native import NativeSwap
from tests.support import kv
from tests.support.swap_case import PLAIN, Case, host_memory, layout_of, view_of


def rig(library, path=CopyPath.AUTO, device="cuda:0", layers=8):
    layout = layout_of(layers=(LayerSpec(4, 64),) * layers)
    case = Case.of(layout, 64, device, **PLAIN)
    torch.cuda.synchronize()
    swap = NativeSwap(library, layout, case.caches, path=path)
    host = host_memory(case.host_bytes(32), device)
    swap.add_host(address_of(view_of(host)), len(host))
    copies = case.copies([[2 * i, 2 * i + 1] for i in range(32)], 32, view_of(host))
    return case, swap, host, copies


def gpu_instance(store, device="cuda:0", **changes) -> kv.Instance:
    def on_gpu(layout, num_blocks=64, fill=None):
        return [c.to(device) for c in make(layout, 256, fill)]

    make, kv.caches_of = kv.caches_of, on_gpu
    try:
        instance = kv.Instance(store, native="require", staging="64MiB", **changes)
    finally:
        kv.caches_of = make
    instance.pool.ready()
    return instance


def spin(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1.5e6))
