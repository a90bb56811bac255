"""The native block copies against torch's: every byte in its place, nothing else touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdstore.format.layout import LayerSpec, Layout
from pdstore.native.abi import CopyPath
from pdstore.native.library import address_of
from pdstore.worker.swap.torch import TorchSwap
from tests.support import native_kit
from tests.support.swap_case import PLAIN, SIZES, Case, host_memory, layout_of, native_of, view_of

SHAPES = st.fixed_dictionaries(
    {
        "split": st.booleans(),
        "heads_outer": st.booleans(),
        "pad": st.sampled_from([0, 0, 1, 3, 16]),
        "offset": st.integers(0, 3),
    }
)


@st.composite
def layouts(draw) -> Layout:
    """Up to 18 regions of small copies, in every split."""
    engine = draw(st.sampled_from([1, 2, 4, 16]))
    heads = draw(st.sampled_from([1, 2, 4]))
    specs = [
        LayerSpec(heads, draw(st.integers(1, 40)), value_dim=draw(st.integers(1, 40))),
        LayerSpec(1, draw(st.integers(1, 90)), value_dim=0, kind="mla"),
    ]
    layers = draw(st.lists(st.sampled_from(specs), min_size=1, max_size=9))
    return Layout(
        dtype=draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
        rope="",
        layers=tuple(layers),
        block_tokens=engine * draw(st.sampled_from([1, 2, 4])),
        engine_block_tokens=engine,
        num_shards=draw(st.sampled_from([s for s in (1, 2, 4) if heads % s == 0])),
    )


@st.composite
def deep_layouts(draw) -> Layout:
    """Up to 80 layers, and with K and V apart twice the regions; copies from 3 bytes on."""
    return Layout(
        dtype="uint8",
        rope="",
        layers=(LayerSpec(1, draw(st.integers(3, 24)), value_dim=draw(st.integers(0, 9))),)
        * draw(st.integers(1, 80)),
        block_tokens=2,
        engine_block_tokens=draw(st.sampled_from([1, 2])),
    )


@st.composite
def wide_layouts(draw) -> Layout:
    """Pieces of up to 256 KiB, even and odd."""
    tokens = draw(st.sampled_from([1, 4, 16]))
    most = (256 << 10) // tokens
    width = draw(st.one_of(st.sampled_from([most, most - 1]), st.integers(1000, most)))
    return Layout(
        dtype="uint8",
        rope="",
        layers=(LayerSpec(1, width, value_dim=0, kind="mla"),) * draw(st.integers(1, 3)),
        block_tokens=tokens,
        engine_block_tokens=tokens,
    )


def check_parity(library, device, data, layout, most_blocks) -> None:
    shape = data.draw(SHAPES)
    num_blocks = data.draw(st.integers(most_blocks // 2, most_blocks))
    case = Case.of(layout, num_blocks, device, **shape)
    per_block = layout.block_tokens // layout.engine_block_tokens
    num_tokens = data.draw(st.integers(1, layout.block_tokens))
    used = -(-num_tokens // layout.engine_block_tokens)
    ids = data.draw(st.permutations(range(num_blocks)))
    blocks = data.draw(st.integers(0, num_blocks // per_block))
    tables = [ids[i * per_block :][:used] for i in range(blocks)]
    path = data.draw(st.sampled_from(list(CopyPath)))
    small = data.draw(st.sampled_from([0, 256, 4096]))
    sizes = dict.fromkeys(SIZES, small)
    torch_swap = TorchSwap(layout, case.caches)
    native = native_of(library, case, device, path=path, sizes=sizes)
    want = host_memory(case.host_bytes(max(blocks, 1)), device)
    got = want.clone().pin_memory() if device != "cpu" else want.clone()
    native.add_host(address_of(view_of(got)), len(got))
    repeated = tables + tables[:1]  # reading a block twice is fine
    torch_swap.gather(case.copies(tables, num_tokens, view_of(want)))
    native.gather(case.copies(tables, num_tokens, view_of(got)))
    assert torch.equal(got, want)
    room = host_memory(case.host_bytes(len(repeated)), device)
    native.add_host(address_of(view_of(room)), len(room))
    native.gather(case.copies(repeated, num_tokens, view_of(room)))
    again = host_memory(len(room), "cpu")
    torch_swap.gather(case.copies(repeated, num_tokens, view_of(again)))
    assert torch.equal(room, again)

    step = layout.engine_block_tokens
    first = data.draw(st.integers(0, (num_tokens - 1) // step)) * step
    a, b = (Case.of(layout, num_blocks, device, **shape, seed=1) for _ in range(2))
    TorchSwap(layout, a.caches).scatter(a.copies(tables, num_tokens, view_of(want), first))
    into = native_of(library, b, device, path=path, sizes=sizes)
    into.add_host(address_of(view_of(got)), len(got))
    into.scatter(b.copies(tables, num_tokens, view_of(got), first))
    assert torch.equal(a.buffer, b.buffer)
    assert torch.equal(got, want)
    native.close()
    into.close()


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("device", native_kit.DEVICES)
@settings(deadline=None, max_examples=200, suppress_health_check=SLOW)
@given(data=st.data())
def test_the_native_copies_are_torchs_in_every_layout_on_every_path(library, device, data):
    """Every byte, whatever the strides, the alignment and the size: a tail is not dropped."""
    kinds = [(layouts(), 20)] * 5 + [(deep_layouts(), 6), (wide_layouts(), 4)]
    layout, most_blocks = data.draw(st.sampled_from(kinds))
    check_parity(library, device, data, data.draw(layout), most_blocks)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("path", list(CopyPath))
def test_every_byte_of_pieces_of_every_small_length_is_copied(library, device, path):
    """A length that is no multiple of a vector has its tail copied, at every alignment."""
    for width in range(1, 68):
        layout = layout_of(
            dtype="uint8",
            layers=(LayerSpec(1, width, value_dim=0, kind="mla"),) * 2,
            block_tokens=1,
            engine_block_tokens=1,
        )
        case = Case.of(layout, 3, device, **{**PLAIN, "offset": width % 17})
        want, got = host_memory(case.host_bytes(3), "cpu"), host_memory(case.host_bytes(3), device)
        TorchSwap(layout, case.caches).gather(case.copies([[2], [0], [1]], 1, view_of(want)))
        native = native_of(library, case, device, path=path)
        native.add_host(address_of(view_of(got)), len(got))
        native.gather(case.copies([[2], [0], [1]], 1, view_of(got)))
        native.close()
        assert torch.equal(got, want), width
