"""Native copies are those of torch, and their sums those of the format."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdstore.errors import SwapError
from pdstore.format.block import HEADER_BYTES, checksum
from pdstore.format.identity import LayerSpec
from pdstore.format.layout import Layout
from pdstore.native.arena import ValueBatch
from pdstore.native.library import CopyPath, address_of
from pdstore.store.arena.store import ArenaStore
from pdstore.testing.values import fresh_keys
from pdstore.worker.swap.base import TorchSwap
from pdstore.worker.swap.native import NativeSwap
from tests.support import native_kit
from tests.support.arena_kit import place_of
from tests.support.gpu_kit import spin
from tests.support.native_kit import DEVICES
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
    """Up to 36 regions of small copies, in every split; two tables of equal or other blocks.

    K, V and MLA with scales apart or without; pages; drafts; states that ranks hold or share out.
    """
    engine = draw(st.sampled_from([1, 2, 4, 16]))
    more = draw(st.sampled_from([1, 2, 4]))
    heads = draw(st.sampled_from([1, 2, 4]))
    scales = draw(st.sampled_from([None, "float32", "bfloat16", "float8_e4m3fn"]))
    full = LayerSpec(heads, draw(st.integers(1, 40)), value_dim=draw(st.integers(1, 40)))
    latent = LayerSpec.latent(draw(st.integers(1, 90)), table=1)
    specs = [full, latent, *(replace(spec, scales=scales) for spec in (full, latent))]
    specs += [
        LayerSpec.page(draw(st.integers(1, 300)), engine, "a"),
        LayerSpec.page(draw(st.integers(1, 300)), engine * more, "b", table=1),
    ]
    shards = draw(st.sampled_from([s for s in (1, 2, 4) if heads % s == 0]))
    layers = draw(st.lists(st.sampled_from(specs), min_size=1, max_size=9))
    tables = 1 + max(spec.table for spec in layers)
    states = [
        LayerSpec.state(draw(st.integers(1, 300)), "a", ranks=shards, table=tables),
        LayerSpec.state(draw(st.integers(1, 300)), "b", table=tables, is_whole=True),
    ]
    layers += draw(st.lists(st.sampled_from(states), max_size=4))
    tp_size = shards if states[0] in layers else 1
    return layout_of(
        dtype=draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
        layers=(*layers, *[replace(full, optional=True)] * draw(st.sampled_from([0, 0, 1, 2]))),
        block_tokens=engine * more * draw(st.sampled_from([1, 2, 4])),
        engine_block_tokens=(
            *(engine, engine * more)[:tables],
            *([None] if any(spec.is_state for spec in layers) else []),
        ),
        num_shards=shards,
        tp_size=tp_size,
        tp_rank=draw(st.integers(0, tp_size - 1)),
    )


@st.composite
def deep_layouts(draw) -> Layout:
    """Up to 80 layers, and with K and V apart twice the regions; copies from 3 bytes on."""
    return layout_of(
        dtype="uint8",
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
    return layout_of(
        dtype="uint8",
        layers=(LayerSpec.latent(width),) * draw(st.integers(1, 3)),
        block_tokens=tokens,
        engine_block_tokens=tokens,
    )


def check_parity(library, device, data, layout, most_blocks) -> None:
    shape = data.draw(SHAPES)
    num_blocks = data.draw(st.integers(most_blocks // 2, most_blocks))
    case = Case.of(layout, num_blocks, device, **shape)
    # larger engine blocks need only the first ids
    least = min(filter(None, layout.geometry.tables))
    per_block = layout.block_tokens // least
    num_tokens = data.draw(st.integers(1, layout.block_tokens))
    used = -(-num_tokens // least)
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

    step = layout.geometry.common_tokens
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
            layers=(LayerSpec.latent(width),) * 2,
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


NUM_BLOCKS = 24
PATHS = list(CopyPath)


class Rig:
    """An arena, P's cache with random bytes and D's with zeros, and an engine for each."""

    def __init__(self, library, directory, device, layout, shape, path=CopyPath.AUTO, size=0):
        self.layout, self.library = layout, library
        self.store = ArenaStore(library, "test", directory=directory, size=8 << 20)
        self.cases = [Case.of(layout, NUM_BLOCKS, device, **shape) for _ in "pd"]
        self.cases[1].buffer.zero_()
        if device != "cpu":
            torch.cuda.synchronize()
        sizes = dict.fromkeys(SIZES, size)
        self.p, self.d = (
            NativeSwap(library, layout, case.caches, path=path, sizes=sizes) for case in self.cases
        )
        self.memory = self.store.memory()
        if device != "cpu":
            self.p.register(address_of(self.memory), len(self.memory))
            self.d.add_host(address_of(self.memory), len(self.memory))
        self.is_registered = device != "cpu"

    def close(self) -> None:
        for swap in (self.p, self.d):
            swap.close()
        if self.is_registered:
            self.library.unregister(0, address_of(self.memory))
        del self.memory
        self.store.close()

    def sizes(self, values) -> list[int]:
        return [HEADER_BYTES + self.layout.payload_bytes(part, n) for part, _, n, _ in values]

    def batch(self, swap, keys, values, ready=0) -> ValueBatch:
        columns = zip(*values, strict=True)
        items, block_ids = swap.pack_columns(*columns, [0] * len(values))
        return ValueBatch(
            keys=keys,
            sizes=array("q", self.sizes(values)).tobytes(),
            starts=b"".join(bytes([i + 1]) * 56 for i in range(len(values))),
            engine=swap.engine,
            items=items,
            block_ids=block_ids,
            ready=ready,
        )

    def values(self, num_tokens, first_token=0):
        """Some values of each part in scattered blocks; the last of fewer tokens."""
        step = self.layout.engine_block_tokens
        per_block = -(-self.layout.block_tokens // step)
        ids = [(7 * i + 3) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
        values = []
        for n, tokens in enumerate([self.layout.block_tokens] * 3 + [num_tokens]):
            blocks = ids[n * per_block :][: -(-tokens // step)]
            values += [(part, blocks, tokens, first_token) for part in self.layout.owned_parts]
        return values

    def fill(self, values):
        keys = fresh_keys(len(values))
        batch = self.batch(self.p, keys, values)
        assert self.store.fill([batch]).error is None
        return keys

    def value_at(self, key, size) -> memoryview:
        return place_of(self.store, key, size)

    def fit_their_sums(self, keys, values) -> list[bool]:
        """Tells of each stored value whether its bytes have the checksum in its header."""
        stored = [self.value_at(*of) for of in zip(keys, self.sizes(values), strict=True)]
        return [int.from_bytes(value[56:64], "little") == checksum(value) for value in stored]

    def num_right(self, keys, values) -> int | None:
        """Loads all values; None if one was seen to be wrong before the copies."""
        copies = self.store.start_scatter(self.batch(self.d, keys, values))
        if copies is None:
            return None
        assert copies.wait(30)
        return self.store.confirm(copies)[1]


@pytest.fixture
def make(library, memory_path):
    made: list[Rig] = []

    def make(*args, **kinds) -> Rig:
        made.append(Rig(library, memory_path, *args, **kinds))
        return made[-1]

    yield make
    library.mend()
    for rig in made:
        rig.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("heads_outer", [False, True])
@pytest.mark.parametrize(("heads", "engine"), [(1, 32), (4, 16), (2, 1)])
@pytest.mark.parametrize("num_tokens", [1, 19, 32])
def test_a_sum_of_what_was_copied_is_that_of_what_is_stored(
    make, device, split, heads_outer, heads, engine, num_tokens
):
    """Where the bytes lie in the cache does not matter; one that is wrong anywhere does."""
    layers = (LayerSpec(heads, 24, value_dim=40), LayerSpec(heads, 24, value_dim=40)) * 2
    block = 32 if engine > 1 else 4
    num_tokens = min(num_tokens, block)
    layout = layout_of(layers=layers, block_tokens=block, engine_block_tokens=engine)
    shape = {"split": split, "heads_outer": heads_outer, "pad": 16, "offset": 8}
    rig = make(device, layout, shape)
    values = rig.values(num_tokens)
    keys, sizes = rig.fill(values), rig.sizes(values)
    assert all(rig.fit_their_sums(keys, values))
    assert rig.num_right(keys, values) == len(values)
    for wrong in (len(values) - 1, 1):
        for place in (HEADER_BYTES, sizes[wrong] // 2, sizes[wrong] - 1, 60):
            value = rig.value_at(keys[wrong], sizes[wrong])
            value[place] ^= 0x10
            assert rig.num_right(keys, values) == wrong
            value[place] ^= 0x10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [0, 4096])
def test_sums_follow_all_slices_of_a_copy_on_every_path(make, device, path, size):
    """Of values that several slices share, too: more than one lane copies them."""
    layout = layout_of(layers=(LayerSpec(4, 64), LayerSpec(2, 64)) * 6)
    rig = make(device, layout, {**PLAIN, "split": True}, path=path, size=size)
    values = rig.values(17)
    keys = rig.fill(values)
    for _ in range(5):
        rig.cases[1].buffer.zero_()
        assert rig.num_right(keys, values) == len(values)
    rig.value_at(keys[2], rig.sizes(values)[2])[-1] ^= 1
    assert rig.num_right(keys, values) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_byte_that_changes_while_the_copy_is_under_way_is_seen(make, library, device):
    rig = make(device, layout_of(), PLAIN)
    values = rig.values(32)
    keys = rig.fill(values)
    value = rig.value_at(keys[1], rig.sizes(values)[1])
    library.delay(300_000)
    copies = rig.store.start_scatter(rig.batch(rig.d, keys, values))
    assert copies is not None
    assert rig.store.confirm(copies)[1] == 0, "nothing is right before the end"
    value[-5] ^= 0x40
    assert copies.wait(30)
    assert rig.store.confirm(copies)[1] == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [0, 4096])
def test_a_byte_that_changes_after_the_copy_of_a_save_is_seen(make, library, device, path, size):
    """Another process's byte is never sealed as right: the sum is that of the paged cache."""
    rig = make(device, layout_of(layers=(LayerSpec(4, 64),) * 6), PLAIN, path=path, size=size)
    values = rig.values(17)
    library.change(rig.memory)
    keys = rig.fill(values)
    assert rig.num_right(keys, values) == 0
    assert rig.fit_their_sums(keys, values) == [False, True, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_save_of_values_of_which_some_are_stored_sums_each_of_the_others(make, library, device):
    """Stored ones are not copied again, so the copies' numbers are not those of the values."""
    rig = make(device, layout_of(), PLAIN)
    values = rig.values(17)
    keys = fresh_keys(len(values))
    assert rig.store.fill([rig.batch(rig.p, keys[1:2], values[1:2])]).error is None
    filled = rig.store.fill([rig.batch(rig.p, keys, values)])
    assert filled.error is None
    assert filled.indices == [0, *range(2, len(values))]
    assert all(rig.fit_their_sums(keys, values))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "first_token"),
    [({**PLAIN, "offset": 3}, 0), ({**PLAIN, "heads_outer": True, "pad": 3}, 0), (PLAIN, 16)],
)
def test_what_the_device_cannot_sum_is_summed_before_the_copy(make, device, shape, first_token):
    """Rows off 16 bytes, and values of which some tokens are not copied."""
    rig = make(device, layout_of(), shape)
    values = rig.values(32)
    keys = rig.fill(values)
    some = rig.values(32, first_token)
    assert rig.num_right(keys, some) == len(values)
    rig.value_at(keys[1], rig.sizes(values)[1])[-1] ^= 1
    assert rig.num_right(keys, some) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 4096])
def test_batches_of_one_save_get_the_sums_of_their_own_values(make, device, size):
    """The lanes take turns, so a batch's digests come while another batch is copied."""
    rig = make(device, layout_of(layers=(LayerSpec(4, 64),) * 6), PLAIN, size=size)
    values = rig.values(17)
    keys = [fresh_keys(len(values)) for _ in range(8)]
    batches = [rig.batch(rig.p, of, values[n % 3 :] + values[: n % 3]) for n, of in enumerate(keys)]
    assert rig.store.fill(batches).error is None
    for n, of in enumerate(keys):
        assert rig.num_right(of, values[n % 3 :] + values[: n % 3]) == len(values)


@pytest.mark.cuda
@native_kit.needs_gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_save_sums_what_the_model_has_written_when_its_event_fires(make, path, num_batches):
    """Neither before the event, nor what the model writes to the blocks after the save."""
    rig = make("cuda:0", layout_of(layers=(LayerSpec(4, 64),) * 6), PLAIN, path=path)
    values = rig.values(5)
    ids = [block for _, blocks, _, _ in values[:3] for block in blocks]  # of whole blocks
    for _ in range(3):
        event = torch.cuda.Event()
        spin(30)
        rig.cases[0].buffer.copy_(torch.randint_like(rig.cases[0].buffer, 256))
        event.record()
        keys = [fresh_keys(len(values)) for _ in range(num_batches)]
        batches = [rig.batch(rig.p, of, values, ready=event.cuda_event) for of in keys]
        assert rig.store.fill(batches).error is None
        assert event.query()
        wanted = [cache[ids].view(torch.uint8) for cache in rig.cases[0].caches]
        rig.cases[0].buffer.zero_()
        torch.cuda.synchronize()
        for of in keys:
            assert rig.num_right(of, values) == len(values)
            for cache, want in zip(rig.cases[1].caches, wanted, strict=True):
                assert torch.equal(cache[ids].view(torch.uint8), want)
        rig.store.remove([key for of in keys for key in of])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", ["sum", "batch"])
def test_a_sum_that_fails_fails_its_save_alone(make, library, device, call):
    """Nothing of it is stored, and no later save gets its digests."""
    rig = make(device, layout_of(), PLAIN, path=CopyPath.STRIDED)
    values = rig.values(32)
    keys = fresh_keys(len(values))
    library.fail(call, 0, 719)
    with pytest.raises(SwapError) as failure:
        rig.store.fill([rig.batch(rig.p, keys, values)])
    assert failure.value.device_code == 719
    assert rig.store.match(keys) == 0
    for _ in range(3):
        keys = rig.fill(values)
        assert rig.num_right(keys, values) == len(values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", ["sum", "batch"])
def test_a_sum_that_fails_fails_its_load_alone(make, library, device, call):
    rig = make(device, layout_of(), PLAIN, path=CopyPath.STRIDED)
    values = rig.values(32)
    keys = rig.fill(values)
    library.fail(call, 0, 719)
    copies = rig.store.start_scatter(rig.batch(rig.d, keys, values))
    assert copies is not None
    with pytest.raises(SwapError) as failure:
        copies.wait(30)
    assert failure.value.device_code == 719
    assert rig.store.confirm(copies)[1] == 0
    assert rig.num_right(keys, values) == len(values)
