"""Block copies: every byte in its place, nothing else touched."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdstore.errors import LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import Part
from pdstore.format.layout import Layout
from pdstore.worker.swap.base import BlockCopy, TorchSwap
from tests.support.kv import POISON, caches_of, flat_layout

MLA = LayerSpec.latent(24)


def layout_of(**changes) -> Layout:
    return flat_layout(
        **{
            "dtype": "float32",
            "layers": (LayerSpec(4, 6), LayerSpec(4, 6)),
            "block_tokens": 8,
            "engine_block_tokens": 4,
            "rope": "",
            **changes,
        }
    )


def copy_of(layout, part, block_ids, num_tokens, first_token=0, payload=None) -> BlockCopy:
    if payload is None:
        payload = memoryview(bytearray(layout.payload_bytes(part, num_tokens)))
    return BlockCopy(part, block_ids, num_tokens, first_token, payload)


def expected_payload(layout, caches, part, block_ids, num_tokens) -> bytes:
    """The payload as the format says it, token by token."""
    out = []
    geometry = layout.geometry.parts[part]
    heads = range(geometry.first_head, geometry.first_head + geometry.num_heads)
    for layer in layout.identity.groups[part.group]:
        tokens = caches[layer][list(block_ids)].flatten(0, 1)[:num_tokens]
        for t, h in (
            itertools.product(range(num_tokens), heads)
            if layout.identity.page is None
            else ((t, h) for h in heads for t in range(num_tokens))
        ):
            out.append(tokens[t, h].contiguous().view(torch.uint8))
    return bytes(torch.cat(out).tolist())


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "layers", [(LayerSpec(4, 6), LayerSpec(4, 6)), (MLA,), (LayerSpec(4, 6, value_dim=3),)]
)
def test_a_payload_is_laid_out_as_the_format_says(num_tokens, layers):
    layout = layout_of(layers=layers)
    caches = caches_of(layout, 10)
    copy = copy_of(layout, Part(0, 0), [7, 2], num_tokens)
    TorchSwap(layout, caches).gather([copy])
    assert bytes(copy.payload) == expected_payload(layout, caches, Part(0, 0), [7, 2], num_tokens)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_gathered_and_scattered_is_equal_and_nothing_else_is_written(data):
    num_shards = data.draw(st.sampled_from([1, 2, 4]))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
    layers = data.draw(st.lists(st.sampled_from([LayerSpec(4, 5), MLA]), min_size=1, max_size=4))
    layout = layout_of(num_shards=num_shards, dtype=dtype, layers=tuple(layers))
    fill = 9.0
    source = [(c * 10).to(c.dtype) for c in caches_of(layout, 12)]
    target = caches_of(layout, 12, fill=fill)
    ids = data.draw(st.permutations(range(12)))
    num_tokens = data.draw(st.integers(1, 8))
    first = data.draw(st.integers(0, (num_tokens - 1) // 4)) * 4
    src, dst = ids[:2], ids[5:7]
    copies = [copy_of(layout, part, src, num_tokens) for part in layout.owned_parts]
    TorchSwap(layout, source).gather(copies)
    TorchSwap(layout, target).scatter(
        [p._replace(block_ids=dst, first_token=first) for p in copies]
    )
    for a, b in zip(source, target, strict=True):
        got, want = b[dst].flatten(0, 1), a[src].flatten(0, 1)
        assert torch.equal(got[first:num_tokens], want[first:num_tokens])
        assert (got[:first] == fill).all()
        assert (got[num_tokens:] == fill).all()
        others = [i for i in range(12) if i not in dst]
        assert (b[others] == fill).all()


@pytest.mark.requirement(
    "R7, C7", "sizes need not be whole machine words, and K and V may differ in size"
)
def test_separate_k_and_v_are_one_payload():
    layout = layout_of()
    caches = caches_of(layout, 4)
    split = [(c[..., :6].contiguous(), c[..., 6:].contiguous()) for c in caches]
    a, b = (copy_of(layout, Part(0, 0), [0, 2], 8) for _ in range(2))
    TorchSwap(layout, caches).gather([a])
    TorchSwap(layout, split).gather([b])
    assert bytes(a.payload) == bytes(b.payload)
    target = [tuple(torch.full_like(t, POISON) for t in pair) for pair in split]
    TorchSwap(layout, target).scatter([b])
    for pair, want in zip(target, split, strict=True):
        assert all(torch.equal(t[[0, 2]], w[[0, 2]]) for t, w in zip(pair, want, strict=True))


def test_a_cache_may_have_any_strides_but_the_last():
    layout = layout_of()
    caches = caches_of(layout, 4)
    heads_first = [c.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for c in caches]
    a, b = (copy_of(layout, Part(0, 0), [1, 2], 5) for _ in range(2))
    TorchSwap(layout, caches).gather([a])
    TorchSwap(layout, heads_first).gather([b])
    assert bytes(a.payload) == bytes(b.payload)


@pytest.mark.parametrize("block_ids", [[0, 10], [-1, 0], [0]])
def test_block_ids_that_do_not_fit_are_refused(block_ids):
    layout = layout_of()
    swap = TorchSwap(layout, caches_of(layout, 10))
    for copy in (swap.gather, swap.scatter):
        with pytest.raises(LayoutError, match="block"):
            copy([copy_of(layout, Part(0, 0), block_ids, 8)])


@pytest.mark.parametrize(
    ("block_ids", "first_token", "words"), [([3, 3], 0, "twice"), ([3, 4], 2, "first_token 2")]
)
def test_a_scatter_into_one_block_twice_or_from_inside_one_is_refused(
    block_ids, first_token, words
):
    layout = layout_of()
    swap = TorchSwap(layout, caches_of(layout, 10))
    with pytest.raises(LayoutError, match=words):
        swap.scatter([copy_of(layout, Part(0, 0), block_ids, 8, first_token)])
