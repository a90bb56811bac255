"""behind_caller: an event behind the caller's stream, on the pool's device."""

from __future__ import annotations

import pytest
import torch

from pdstore.errors import SwapError
from pdstore.format.layout import Layout
from pdstore.worker.caller_stream import behind_caller
from pdstore.worker.swap.torch import TorchSwap
from tests.support.kv import LAYERS, caches_of, settings_of


def a_swap(device="cpu"):
    settings = settings_of()
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope="")
    return TorchSwap(layout, [cache.to(device) for cache in caches_of(layout)])


def test_the_cpu_has_no_stream_to_follow():
    assert behind_caller(a_swap()) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_stream_under_capture_is_refused():
    swap, x = a_swap("cuda:0"), torch.zeros(8, device="cuda:0")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        with pytest.raises(SwapError, match="captured"):
            behind_caller(swap)
