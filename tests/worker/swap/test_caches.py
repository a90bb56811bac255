"""Tensors are viewed as bytes, the defaults of a Swap, and the one that PDSTORE_NATIVE chooses."""

from __future__ import annotations

import pytest
import torch

from pdstore.errors import LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.worker.swap import open_swap
from pdstore.worker.swap.base import TorchSwap, caches_as_bytes
from pdstore.worker.swap.native import NativeSwap
from tests.support.kv import caches_of, settings_of
from tests.worker.swap.test_torch import layout_of


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c[:1], "1 cache tensors for 2"),
        (lambda c: [c[0].half(), c[1]], "layer 0"),
        (lambda c: [c[0], c[1][:, :2]], "layer 1"),
        (lambda c: [c[0], c[1][..., :5]], "channels"),
        (lambda c: [c[0], c[1][..., ::2]], "contiguous"),
        (lambda c: [c[0], c[1][:5]], "same number of blocks"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, word):
    layout = layout_of()
    with pytest.raises(LayoutError, match=word):
        caches_as_bytes(layout.geometry, change(caches_of(layout, 10)))


def test_a_page_of_one_head_is_one_cell():
    layout = layout_of(page="packed", block_tokens=4)
    heads_first = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches_of(layout, 4)]
    viewed = caches_as_bytes(layout.geometry, heads_first).tensors.values()
    for cache, [cells] in zip(heads_first, viewed, strict=True):
        blocks, tokens, heads, channels = cache.shape
        assert cells.shape == (blocks, 1, heads, tokens * channels * cache.itemsize)
        assert cells.data_ptr() == cache.data_ptr()


def test_states_are_the_bytes_of_a_tensor_of_any_type_with_gaps_or_without():
    layout = layout_of(layers=(LayerSpec.state(2048, "f"),) * 3)
    padded = torch.zeros(4, 3000, dtype=torch.int8)
    caches = [
        torch.zeros(4, 8, 64, dtype=torch.float32),
        padded[:, None, None, 100:2148],
        torch.zeros(4, 1024, dtype=torch.bfloat16),
    ]
    viewed = caches_as_bytes(layout.geometry, caches).tensors.values()
    assert [cell.shape for [cell] in viewed] == [(4, 1, 1, 2048)] * 3
    assert [cell.stride(0) for [cell] in viewed] == [2048, 3000, 2048]
    assert [cell.data_ptr() for [cell] in viewed] == [cache.data_ptr() for cache in caches]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c[:1], "1 cache tensors for 2"),
        (
            lambda c: [c[0], torch.zeros(4, 4096, dtype=torch.uint8)[:, ::2]],
            "cache 1: .* contiguous",
        ),
        (lambda c: [c[0], c[1][:, 1:]], "cache 1: 2047 bytes a block, expected 2048"),
        (lambda c: [(c[0], c[0]), c[1]], "cache 0"),
        (lambda c: [c[0], c[1][:3]], "same number of blocks"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, word):
    layout = layout_of(layers=(LayerSpec.state(2048, "f"),) * 2)
    states = [torch.zeros(4, 2048, dtype=torch.uint8) for _ in range(2)]
    caches_as_bytes(layout.geometry, states)
    with pytest.raises(LayoutError, match=word):
        caches_as_bytes(layout.geometry, change(states))


def test_payloads_may_lie_in_any_memory_unless_a_registrar_says_otherwise():
    layout = layout_of()
    swap = TorchSwap(layout, caches_of(layout))
    assert swap.registrar is None
    with swap.relaxed():
        pass
    swap.close()
    swap.close()


def test_off_means_torch():
    layout = layout_of()
    swap = open_swap(settings_of(native="off"), layout, caches_of(layout))
    assert isinstance(swap, TorchSwap)
    assert {p.path for p in swap.plan()} == {"TORCH"}


def test_auto_means_the_library_on_host_tensors_too(closed_after):
    layout = layout_of()
    swap = closed_after(open_swap(settings_of(), layout, caches_of(layout)))
    assert isinstance(swap, NativeSwap)
