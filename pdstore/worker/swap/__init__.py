"""Block copies between an engine's paged cache and host memory, with or without a pool."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.layout import Layout
from pdstore.native.library import load_library
from pdstore.settings import Settings
from pdstore.worker.swap.base import (
    BlockCopy,
    BlockCopyPlan,
    LayerCache,
    ReadyEvent,
    Registrar,
    Swap,
    TorchSwap,
    caches_as_bytes,
)
from pdstore.worker.swap.native import NativeSwap

__all__ = ["BlockCopy", "BlockCopyPlan", "ReadyEvent", "Registrar", "Swap", "open_swap"]


def open_swap(settings: Settings, layout: Layout, kv_caches: Sequence[LayerCache]) -> Swap:
    """Opens a NativeSwap if PDSTORE_NATIVE and the machine allow it, else a TorchSwap.

    kv_caches: one entry for each of `layout.held_layers`, or for each piece of a page, as
      `TorchSwap` takes them; kept until `close`.
    Raises ConfigError if the native library is required and missing; LayoutError for tensors that
    do not fit the layout; DeviceError or SwapError if the device refuses a call of the library.
    """
    device = caches_as_bytes(layout.geometry, kv_caches).device
    library = None
    if device.type in ("cpu", "cuda"):
        library = load_library(settings, for_gpu=device.type == "cuda")
    if library is None:
        return TorchSwap(layout, kv_caches)
    return NativeSwap(library, layout, kv_caches)
