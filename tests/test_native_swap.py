"""The native block copies against torch's: every byte in its place, nothing else touched."""

from __future__ import annotations

from dataclasses import dataclass

import native_kit
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdstore.errors import LayoutError, SwapError
from pdstore.layout import LayerSpec, Layout
from pdstore.native import address_of
from pdstore.native_abi import CopyPath
from pdstore.swap import Piece, TorchSwap
from pdstore.swap_native import NativeSwap
from pdstore.types import Direction

POISON = 0xA5
SIZES = ("copy_out_bytes", "copy_in_bytes", "stage_out_bytes", "stage_in_bytes")
GUARD = 64  # bytes around each payload that nobody may touch


@pytest.fixture(scope="module")
def library():
    return native_kit.library()


def host_memory(num_bytes: int, device: str) -> torch.Tensor:
    memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
    return memory.pin_memory() if device != "cpu" else memory


def view_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())


@dataclass
class Case:
    """A layout with caches in one poisoned buffer, so that gaps can be compared too."""

    layout: Layout
    num_blocks: int
    buffer: torch.Tensor
    caches: list

    @classmethod
    def of(cls, layout, num_blocks, device, *, split, heads_outer, pad, offset, seed=0) -> Case:
        shapes = []
        at = offset
        for n, spec in enumerate(layout.layers):
            widths = [spec.head_dim, spec.channels - spec.head_dim] if split else [spec.channels]
            for width in filter(None, widths):
                heads, tokens = layout.local_heads(n), layout.engine_block_tokens
                inner = width + (pad if pad % 2 else 0)
                strides = (
                    (tokens * heads * inner + pad, inner, tokens * inner, 1)
                    if heads_outer
                    else (tokens * heads * inner + pad, heads * inner, inner, 1)
                )
                shapes.append((n, at, (num_blocks, tokens, heads, width), strides))
                at += num_blocks * strides[0] + pad
        generator = torch.Generator().manual_seed(seed)
        bytes_ = torch.randint(0, 256, (at * layout.itemsize,), generator=generator)
        buffer = bytes_.to(torch.uint8).to(device)
        flat = buffer.view(getattr(torch, layout.dtype))
        layers: list[list[torch.Tensor]] = [[] for _ in layout.layers]
        for n, start, shape, strides in shapes:
            layers[n].append(torch.as_strided(flat, shape, strides, start))
        caches = [tuple(t) if len(t) == 2 else t[0] for t in layers]
        return cls(layout, num_blocks, buffer, caches)

    def pieces(self, ids_of_blocks, num_tokens, host, first_token=0, parts=None):
        """One piece per part and pool block, each with a guard around its payload."""
        pieces, at = [], GUARD
        for ids in ids_of_blocks:
            for part in parts or self.layout.owned_parts:
                size = self.layout.payload_bytes(part, num_tokens)
                pieces.append(Piece(part, ids, num_tokens, first_token, host[at : at + size]))
                at += size + GUARD
        return pieces

    def host_bytes(self, num_blocks) -> int:
        size = sum(
            self.layout.payload_bytes(p, self.layout.block_tokens) + GUARD
            for p in self.layout.owned_parts
        )
        return GUARD + num_blocks * size


@st.composite
def layouts(draw) -> tuple[Layout, dict]:
    engine = draw(st.sampled_from([1, 2, 4, 16]))
    heads = draw(st.sampled_from([1, 2, 4]))
    split = draw(st.booleans())
    specs = [
        LayerSpec(heads, draw(st.integers(1, 40)), value_dim=draw(st.integers(1, 40))),
        LayerSpec(1, draw(st.integers(1, 90)), value_dim=0, kind="mla"),
    ]
    layers = draw(st.lists(st.sampled_from(specs), min_size=1, max_size=9))
    layout = Layout(
        dtype=draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
        rope="",
        layers=tuple(layers),
        block_tokens=engine * draw(st.sampled_from([1, 2, 4])),
        engine_block_tokens=engine,
        order=draw(st.sampled_from(["token", "head"])),
        num_shards=draw(st.sampled_from([s for s in (1, 2, 4) if heads % s == 0])),
    )
    return layout, {
        "split": split,
        "heads_outer": draw(st.booleans()),
        "pad": draw(st.sampled_from([0, 0, 1, 3, 16])),
        "offset": draw(st.integers(0, 3)),
    }


def native_of(library, case, device, **options) -> NativeSwap:
    return NativeSwap(library, case.layout, case.caches, **options)


def check_parity(library, device, data) -> None:
    layout, shape = data.draw(layouts())
    num_blocks = data.draw(st.integers(9, 20))
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
    torch_swap.gather(case.pieces(tables, num_tokens, view_of(want)))
    native.gather(case.pieces(tables, num_tokens, view_of(got)))
    assert torch.equal(got, want)
    room = host_memory(case.host_bytes(len(repeated)), device)
    native.add_host(address_of(view_of(room)), len(room))
    native.gather(case.pieces(repeated, num_tokens, view_of(room)))

    step = layout.engine_block_tokens
    first = data.draw(st.integers(0, (num_tokens - 1) // step)) * step
    a, b = (Case.of(layout, num_blocks, device, **shape, seed=1) for _ in range(2))
    TorchSwap(layout, a.caches).scatter(a.pieces(tables, num_tokens, view_of(want), first))
    into = native_of(library, b, device, path=path, sizes=sizes)
    into.add_host(address_of(view_of(got)), len(got))
    into.scatter(b.pieces(tables, num_tokens, view_of(got), first))
    assert torch.equal(a.buffer, b.buffer)
    assert torch.equal(got, want)
    native.close()
    into.close()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_native_copies_are_torchs_in_every_layout_on_every_path(library, data):
    check_parity(library, "cpu", data)


@pytest.mark.cuda
@native_kit.needs_gpu
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_native_copies_on_a_gpu_are_torchs(library, data):
    check_parity(library, "cuda:0", data)


def layout_of(**changes) -> Layout:
    return Layout(
        **{
            "dtype": "bfloat16",
            "rope": "",
            "layers": (LayerSpec(4, 64),) * 4,
            "block_tokens": 32,
            "engine_block_tokens": 16,
            **changes,
        }
    )


PLAIN = {"split": False, "heads_outer": False, "pad": 0, "offset": 0}


@pytest.mark.parametrize(
    ("changes", "shape", "path", "why"),
    [
        ({}, PLAIN, "STAGE", "small"),
        ({"layers": (LayerSpec(8, 128),) * 32}, PLAIN, "BATCH", "64 KiB"),
        ({"layers": (LayerSpec(8, 64),) * 64}, PLAIN, "STRIDED", "2 MiB"),
        ({"layers": (LayerSpec(8, 64),) * 64}, {**PLAIN, "heads_outer": True}, "STAGE", "order"),
        ({"layers": (LayerSpec(8, 64),) * 64, "num_shards": 2}, PLAIN, "STAGE", "order"),
        ({"layers": (LayerSpec(8, 64),) * 2}, {**PLAIN, "heads_outer": True}, "STAGE", "order"),
    ],
)
def test_the_plan_says_which_path_and_why(library, changes, shape, path, why):
    layout = layout_of(**changes)
    case = Case.of(layout, 4, "cpu", **shape)
    plan = native_of(library, case, "cpu").plan()
    assert (plan[0].path, plan[0].num_tokens) == (path, 32)
    assert why in plan[0].why
    assert plan[1].num_tokens == 1
    assert plan[1].path == "STAGE"


def test_a_block_that_is_one_run_over_its_layers_is_one_piece(library):
    layout = layout_of(block_tokens=16, layers=(LayerSpec(4, 64),) * 8)
    whole = torch.zeros(10, 8, 16, 4, 128, dtype=torch.bfloat16)
    native = NativeSwap(library, layout, [whole[:, n] for n in range(8)])
    plan = native.plan()[0]
    assert plan.path == "BATCH"
    assert "1 x 131072 B" in plan.why


def test_throughput_mode_stages_everything(library):
    layout = layout_of(layers=(LayerSpec(8, 128),) * 32)
    case = Case.of(layout, 4, "cpu", **PLAIN)
    assert {p.path for p in native_of(library, case, "cpu", throughput=True).plan()} == {"STAGE"}


def test_an_item_larger_than_a_slice_is_cut_by_layers(library):
    layout = layout_of(layers=(LayerSpec(4, 64),) * 6)
    case = Case.of(layout, 4, "cpu", **PLAIN)
    layer = layout.payload_bytes(layout.parts[0], 32) // 6
    sizes = {"stage_out_bytes": 2 * layer}
    native = native_of(library, case, "cpu", path=CopyPath.STAGE, sizes=sizes)
    host = host_memory(case.host_bytes(2), "cpu")
    native.gather(case.pieces([[0, 1], [2, 3]], 32, view_of(host)))
    assert native.stats(Direction.SAVE).num_slices == 6


@pytest.mark.parametrize(
    ("ids", "num_tokens", "first", "word"),
    [
        ([0, 9], 32, 0, "block id 9"),
        ([-1, 0], 32, 0, "block id -1"),
        ([0], 32, 0, "1 engine blocks"),
        ([2, 2], 32, 0, "block 2 twice"),
        ([2, 3], 32, 5, "first_token 5"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(library, ids, num_tokens, first, word):
    layout = layout_of()
    case = Case.of(layout, 9, "cpu", **PLAIN)
    before = case.buffer.clone()
    native = native_of(library, case, "cpu")
    host = host_memory(case.host_bytes(2), "cpu")
    good = case.pieces([[0, 1]], 32, view_of(host))
    bad = case.pieces([ids], num_tokens, view_of(host), first)
    with pytest.raises(LayoutError, match=word):
        native.scatter([*good, *bad])
    assert torch.equal(case.buffer, before)
    assert native.stats(Direction.LOAD).num_slices == 0


def test_a_block_written_by_two_pieces_of_one_load_is_refused(library):
    layout = layout_of()
    case = Case.of(layout, 9, "cpu", **PLAIN)
    host = host_memory(case.host_bytes(2), "cpu")
    with pytest.raises(LayoutError, match="block 1 twice"):
        native_of(library, case, "cpu").scatter(case.pieces([[0, 1], [1, 2]], 32, view_of(host)))


def test_a_payload_that_straddles_two_ranges_of_host_memory_is_refused(library):
    layout = layout_of()
    case = Case.of(layout, 9, "cpu", **PLAIN)
    native = native_of(library, case, "cpu")
    host = host_memory(case.host_bytes(2), "cpu")
    pieces = case.pieces([[0, 1]], 32, view_of(host))
    middle = address_of(pieces[0].payload) + 100
    start = address_of(view_of(host))
    native.add_host(start, middle - start)
    native.add_host(middle, start + len(host) - middle)
    with pytest.raises(LayoutError, match="registered range"):
        native.gather(pieces)


def test_a_payload_of_another_length_is_refused(library):
    case = Case.of(layout_of(), 9, "cpu", **PLAIN)
    piece = Piece(case.layout.parts[0], [0, 1], 32, 0, memoryview(bytearray(100)))
    with pytest.raises(LayoutError, match="100 bytes"):
        native_of(library, case, "cpu").gather([piece])


def test_nothing_to_copy_is_done_at_once(library):
    case = Case.of(layout_of(), 9, "cpu", **PLAIN)
    native = native_of(library, case, "cpu")
    assert native.start(Direction.SAVE, []).wait(10)
    native.scatter([])


def test_a_closed_engine_refuses_and_may_be_closed_again(library):
    case = Case.of(layout_of(), 9, "cpu", **PLAIN)
    native = native_of(library, case, "cpu")
    native.close()
    native.close()
    with pytest.raises(SwapError, match="closed"):
        native.gather([])
