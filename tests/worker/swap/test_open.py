"""open_swap: PDSTORE_NATIVE chooses between the native engine and torch."""

from __future__ import annotations

from pdstore.worker.swap import open_swap
from pdstore.worker.swap.native import NativeSwap
from pdstore.worker.swap.torch import TorchSwap
from tests.support.kv import caches_of, settings_of
from tests.worker.swap.test_torch import layout_of


def test_off_means_torch():
    layout = layout_of()
    swap = open_swap(settings_of(native="off"), layout, caches_of(layout))
    assert isinstance(swap, TorchSwap)
    assert {p.path for p in swap.plan()} == {"TORCH"}


def test_auto_means_the_library_on_host_tensors_too():
    layout = layout_of()
    swap = open_swap(settings_of(), layout, caches_of(layout))
    assert isinstance(swap, NativeSwap)
    swap.close()
