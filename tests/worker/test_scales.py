"""Scales of a quantized cache in tensors of their own: each token's move with its K and V."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdstore import JobResult, LayerSpec
from pdstore.engine.self_test import self_test
from pdstore.errors import LayoutError, Reason
from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import Part
from pdstore.format.layout import Layout
from pdstore.store import open_store
from pdstore.testing.values import get
from pdstore.worker.swap import open_swap
from tests.support.kv import POISON, Instance, settings_of
from tests.worker.test_mover import flip, plant

HEADS, DIM, NUM_LAYERS, BLOCK = 4, 8, 3, 96
CELL_BYTES = 2 * DIM + 2 * 4  # of one head
FULL = LayerSpec(HEADS, DIM, scales="float32")
MLA = replace(LayerSpec.latent(24), scales="float32")
TABLES = {16: list(range(20, 40)), 48: list(range(3, 12))[::-1]}
URLS = ["memory://", "file://{}/pool", "shm://scales?size=8MiB&dir={}"]


@pytest.fixture(params=URLS)
def store(request, tmp_path, closed_after):
    return closed_after(open_store(request.param.format(tmp_path), settings_of()))


@pytest.fixture
def half(store, closed_after):
    """Makes one rank of P, with random KV and scales, or of D, filled with poison."""

    def half(fill=None, size=16, layers=(FULL,) * NUM_LAYERS, **changes) -> Instance:
        given = {"layers": layers, "engine_block_tokens": size, "dtype": "int8"}
        return closed_after(Instance(store, fill, **{"block_tokens": BLOCK, **given, **changes}))

    return half


def heads_first(layout, caches):
    """Replaces the caches by K, V and scales that lie in memory as [block, head, token]."""
    for n, (kv, *scales) in enumerate(caches):
        apart = (kv[..., :DIM], kv[..., DIM:], *scales)
        caches[n] = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in apart)
    return open_swap(settings_of(), layout, caches)


def cells_of(ranks, size, layer):
    """Returns the cells of all blocks of a table as [token, head, byte], scales last."""
    of_ranks = []
    for one in ranks:
        taken = [tensor[TABLES[size]].flatten(0, 1) for tensor in one.caches[layer]]
        apart = [each.reshape(*each.shape[:2], -1).contiguous() for each in taken]
        of_ranks.append(torch.cat([each.view(torch.uint8) for each in apart], dim=2))
    return torch.cat(of_ranks, dim=1)


def poison_of(size, num_heads=HEADS, width=2 * DIM, num_scales=2):
    """Returns cells with nothing but poison."""
    num_tokens = size * len(TABLES[size])
    kv = torch.full((num_tokens, num_heads, width), POISON).to(torch.int8).view(torch.uint8)
    scales = torch.full((num_tokens, num_heads, num_scales), POISON).view(torch.uint8)
    return torch.cat([kv, scales], dim=2)


def assert_moved(ps, p_size, ds, d_size, num_tokens, first_token=0):
    """D has the KV and the scales of P's tokens, and its poison in all other places."""
    for layer in range(NUM_LAYERS):
        got, want = cells_of(ds, d_size, layer), cells_of(ps, p_size, layer)
        assert got.shape[1:] == (HEADS, CELL_BYTES)
        assert torch.equal(got[first_token:num_tokens], want[first_token:num_tokens])
        poison = poison_of(d_size)
        for others in (slice(0, first_token), slice(num_tokens, None)):
            assert torch.equal(got[others], poison[others])


def hand_over(ps, p_size, ds, d_size, num_tokens):
    """Saves and loads a prompt on all ranks, as a hand-off."""
    keys = ps[0].cache.keys(range(num_tokens))
    handoff, params = ps[0].cache.announce(keys)
    for p in ps:
        saved = p.pool.save(keys, TABLES[p_size], handoff=handoff)
        assert saved.wait(10) == JobResult(num_tokens)
    found = ds[0].cache.lookup(ds[0].cache.keys(range(num_tokens)), params).wait(10)
    for d in ds:
        assert d.pool.load(found.keys, TABLES[d_size]).wait(10) == JobResult(num_tokens)


def save(p, num_tokens, size=16):
    return p.pool.save(p.cache.keys(range(num_tokens)), TABLES[size]).wait(10)


def load(d, num_tokens, size=16, **more):
    return d.pool.load(d.cache.keys(range(num_tokens)), TABLES[size], **more).wait(10)


@pytest.mark.parametrize("num_tokens", [1, 96, 97, 250])
@pytest.mark.parametrize(("p_size", "d_size"), [(16, 48), (48, 16)])
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 1), (2, 1), (1, 2)])
def test_engine_blocks_and_ranks_may_differ_between_p_and_d(
    half, p_ranks, d_ranks, p_size, d_size, num_tokens
):
    given = {"kv_shards": 2}
    ps = [half(size=p_size, rank=(n, p_ranks), **given) for n in range(p_ranks)]
    ds = [half(POISON, size=d_size, rank=(n, d_ranks), **given) for n in range(d_ranks)]
    hand_over(ps, p_size, ds, d_size, num_tokens)
    assert_moved(ps, p_size, ds, d_size, num_tokens)


@pytest.mark.parametrize(("p_copies", "d_copies"), [("off", "auto"), ("auto", "off")])
def test_copies_by_torch_and_by_the_library_are_the_same(half, p_copies, d_copies):
    p, d = half(native=p_copies), half(POISON, native=d_copies, size=48)
    hand_over([p], 16, [d], 48, 200)
    assert_moved([p], 16, [d], 48, 200)


@pytest.mark.parametrize(("p_order", "d_order"), [(heads_first, None), (None, heads_first)])
def test_k_and_v_may_be_apart_and_scales_lie_in_memory_in_any_order(half, p_order, d_order):
    p, d = half(swap=p_order), half(POISON, size=48, swap=d_order)
    hand_over([p], 16, [d], 48, 200)
    assert_moved([p], 16, [d], 48, 200)


def test_a_tail_carries_the_scales_of_its_token_and_no_byte_of_its_neighbours(half, store):
    p = half()
    assert save(p, BLOCK + 1) == JobResult(BLOCK + 1)
    name = p.cache.keys(range(BLOCK + 1)).store_keys([Part(0, 0)])[1]
    size = HEADER_BYTES + NUM_LAYERS * HEADS * CELL_BYTES
    stored = bytes(get(store, [name], [size])[0])
    last = [cells_of([p], 16, layer)[BLOCK] for layer in range(NUM_LAYERS)]
    assert stored[HEADER_BYTES:] == bytes(torch.stack(last).flatten().tolist())

    its_block, its_place = TABLES[16][BLOCK // 16], BLOCK % 16
    for tensor in (tensor for cache in p.caches for tensor in cache):
        kept = tensor[its_block, its_place].clone()
        tensor.fill_(POISON)
        tensor[its_block, its_place] = kept
    store.remove([name])
    assert save(p, BLOCK + 1) == JobResult(BLOCK + 1)
    assert bytes(get(store, [name], [size])[0]) == stored


@pytest.mark.parametrize("first_token", [48, 96, 144])
def test_a_load_leaves_the_scales_that_the_engine_has(half, first_token):
    p, d = half(), half(POISON, size=48)
    assert save(p, 250) == JobResult(250)
    assert load(d, 250, 48, first_token=first_token) == JobResult(250)
    assert_moved([p], 16, [d], 48, 250, first_token)


def test_each_rank_loads_the_scales_of_a_latent(half):
    """MLA has one scale a token, which all ranks hold, as they hold the latent."""
    ds = [half(POISON, size=48, layers=(MLA, FULL), rank=(n, 2), kv_shards=2) for n in range(2)]
    p = half(layers=(MLA, FULL), kv_shards=2)
    hand_over([p], 16, ds, 48, 100)
    want = cells_of([p], 16, 0)[:100]
    assert want.shape == (100, 1, 24 + 4)
    for d in ds:
        assert torch.equal(cells_of([d], 48, 0)[:100], want)
        assert torch.equal(cells_of([d], 48, 0)[100:], poison_of(48, 1, 24, 1)[100:])
    assert torch.equal(cells_of(ds, 48, 1)[:100], cells_of([p], 16, 1)[:100])


@pytest.mark.requirement("C16", "length and checksum of a value are checked before use")
@pytest.mark.parametrize("num_tokens", [BLOCK + 36, 2 * BLOCK])
def test_one_wrong_bit_of_a_scale_is_a_miss_that_heals(half, store, num_tokens):
    p, d = half(), half(POISON)
    save(p, num_tokens)
    name = p.cache.keys(range(num_tokens)).store_keys([Part(0, 0)])[1]
    size = HEADER_BYTES + (num_tokens - BLOCK) * NUM_LAYERS * HEADS * CELL_BYTES
    plant(store, name, flip(get(store, [name], [size])[0], size - 1))
    assert load(d, num_tokens) == JobResult(BLOCK, Reason.CORRUPT)
    assert store.match([name]) == 0
    assert save(p, num_tokens) == JobResult(num_tokens)
    assert load(d, num_tokens) == JobResult(num_tokens)
    assert_moved([p], 16, [d], 16, num_tokens)


@pytest.mark.parametrize("scales", [None, "bfloat16"])
def test_an_instance_with_other_scales_or_none_finds_nothing(half, scales):
    p, d = half(), half(POISON, layers=(replace(FULL, scales=scales),) * NUM_LAYERS)
    assert save(p, 200) == JobResult(200)
    assert half(POISON).cache.match(p.cache.keys(range(200))).num_tokens == 200
    assert d.cache.match(d.cache.keys(range(200))).num_tokens == 0
    assert any("scales" in told for told in d.namespace.differences(p.namespace.described))


@pytest.mark.parametrize("native", ["off", "auto"])
def test_the_self_test_of_an_engine_compares_scales(native):
    layout = Layout.of(
        settings_of(), dtype="int8", layers=[FULL] * 2, engine_block_tokens=16, rope=""
    )
    cache = torch.zeros(1, HEADS, 16, DIM, dtype=torch.int8).transpose(1, 2)
    scales = torch.zeros(1, HEADS, 16).transpose(1, 2)
    caches = [(cache, cache, scales, scales)] * 2
    tried = self_test(settings_of(native=native), layout, caches, num_tokens=100)
    assert tried.num_bytes == 2 * 100 * HEADS * CELL_BYTES


@pytest.mark.parametrize(
    "shape", [(64,), (64, HEADS), (64, 1), (64, 1, HEADS), (64, 1, 1), (64, 1, HEADS, 1)]
)
def test_one_scale_for_all_tokens_of_a_block_is_refused_by_name(half, shape):
    def one_a_block(layout, caches):
        kv, keys, _ = caches[1]
        caches[1] = (kv, keys, torch.ones(shape))
        return open_swap(settings_of(), layout, caches)

    message = (
        "layer 1: scales of torch.float32 .*: one scale for all tokens of a block. A prompt's tail"
        " is stored without .*: have the engine quantize with a scale for each token and head, or"
    )
    with pytest.raises(LayoutError, match=message):
        half(swap=one_a_block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kv, k, v: kv, "layer 0: 1 tensors, .* then 2 with scales of torch.float32"),
        (lambda kv, k, v: (kv, k), "layer 0: 2 tensors, expected one or two with K and V"),
        (lambda kv, k, v: (kv, k, v, v, v), "layer 0: 5 tensors"),
        (lambda kv, k, v: (kv, k, v.half()), "torch.float16 .*, expected torch.float32"),
        (lambda kv, k, v: (kv, k, v[:, :8]), r"expected torch.float32 \[blocks, 16, 4\]"),
        (lambda kv, k, v: (kv, k, v[..., 0]), "a scale for each token and head"),
        (lambda kv, k, v: (kv, k, v.transpose(1, 2)), "a view in this order will do"),
        (lambda kv, k, v: (kv, k, v[:5]), "must have the same number of blocks"),
    ],
)
def test_other_tensors_than_the_layers_say_are_refused(half, change, message):
    def changed(layout, caches):
        caches[0] = change(*caches[0])
        return open_swap(settings_of(), layout, caches)

    with pytest.raises(LayoutError, match=message):
        half(swap=changed)


def test_scales_of_a_layer_that_names_none_are_refused(half):
    def with_scales(layout, caches):
        scales = torch.ones(64, 16, HEADS)
        caches[0] = (caches[0], scales, scales)
        return open_swap(settings_of(), layout, caches)

    with pytest.raises(LayoutError, match=r"3 tensors, .* `LayerSpec.scales` names no scales"):
        half(layers=[LayerSpec(HEADS, DIM)], swap=with_scales)
