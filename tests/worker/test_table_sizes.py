"""Block tables with block sizes of their own: real bytes move, by each copy path and each store."""

from __future__ import annotations

import random

import pytest
import torch

from pdstore import JobResult, LayerSpec
from pdstore.engine.self_test import self_test
from pdstore.errors import LayoutError, Reason
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.keys import Part
from pdstore.format.layout import Layout, Pipeline
from pdstore.store import open_store
from tests.support.kv import POISON, Instance, caches_of, flat_layout, settings_of

FULL, MLA = LayerSpec(2, 8), LayerSpec.latent(24, table=1)
SLIDING = LayerSpec(2, 8, window=80, table=1)
LAYERS = [FULL, MLA, LayerSpec(4, 4, table=1), FULL]
P_SIZES, D_SIZES = (16, 32), (64, 8)
"""Tokens of an engine block in each of the two block tables, on P and on D."""
NUM_BLOCKS = {8: 128, 16: 64, 32: 32, 64: 16}
"""Engine blocks in the caches of a table, by their size."""


@pytest.fixture(params=["memory://", "file://{}/pool", "shm://sizes?size=8MiB&dir={}"])
def store(request, tmp_path, closed_after):
    return closed_after(open_store(request.param.format(tmp_path), settings_of()))


@pytest.fixture
def half(store, closed_after):
    def half(sizes, fill=None, layers=LAYERS, **changes) -> Instance:
        counts = [NUM_BLOCKS[size] for size in sizes]
        given = {"layers": layers, "engine_block_tokens": sizes, "num_blocks": counts, **changes}
        return closed_after(Instance(store, fill, **given))

    return half


def tables_of(half: Instance, num_tokens: int, seed: int) -> list[list[int]]:
    """Returns scattered engine blocks for a prompt, for each table as many as it needs."""
    chance, geometry = random.Random(seed), half.layout.geometry
    return [
        chance.sample(range(NUM_BLOCKS[size]), geometry.num_entries(table, num_tokens))
        for table, size in enumerate(geometry.tables)
    ]


def assert_moved(p, d, p_tables, d_tables, num_tokens, first_token=0):
    """Asserts that D has P's KV in [first_token, num_tokens) and its poison everywhere else."""
    for layer, spec in enumerate(p.layout.identity.layers):
        ids = d_tables[spec.table]
        got, want = d.tokens(ids, layer), p.tokens(p_tables[spec.table], layer)
        assert torch.equal(got[first_token:num_tokens], want[first_token:num_tokens])
        assert (got[:first_token] == POISON).all()
        assert (got[num_tokens:] == POISON).all()
        others = [i for i in range(len(d.caches[layer])) if i not in ids]
        assert (d.caches[layer][others] == POISON).all()


@pytest.mark.parametrize(
    ("p_copies", "d_copies"), [("auto", "auto"), ("off", "auto"), ("auto", "off")]
)
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 64, 100, 333])
def test_what_p_saves_from_tables_of_two_sizes_d_loads_into_tables_of_two_others(
    half, num_tokens, p_copies, d_copies
):
    """The engine's block sizes are no part of what P and D have in common."""
    p, d = half(P_SIZES, native=p_copies), half(D_SIZES, POISON, native=d_copies)
    keys = p.cache.keys(range(num_tokens))
    p_tables, d_tables = tables_of(p, num_tokens, 1), tables_of(d, num_tokens, 2)
    assert p.pool.save(keys, p_tables).wait(10) == JobResult(num_tokens)
    found = d.cache.match(d.cache.keys(range(num_tokens)))
    assert found.num_tokens == num_tokens
    assert d.pool.load(found.keys, d_tables).wait(10) == JobResult(num_tokens)
    assert_moved(p, d, p_tables, d_tables, num_tokens)


@pytest.mark.parametrize("first_token", [32, 64, 96, 160])
def test_a_load_begins_after_whole_blocks_of_every_table(half, first_token):
    """Also inside a block of the pool, of 64 tokens."""
    p, d = half(P_SIZES), half(P_SIZES, POISON)
    keys = p.cache.keys(range(200))
    p_tables, d_tables = tables_of(p, 200, 1), tables_of(d, 200, 2)
    p.pool.save(keys, p_tables).wait(10)
    loaded = d.pool.load(keys, d_tables, first_token=first_token)
    assert loaded.wait(10) == JobResult(200)
    assert_moved(p, d, p_tables, d_tables, 200, first_token)
    with pytest.raises(LayoutError, match="first_token 48 must be a multiple of 32"):
        d.pool.load(keys, d_tables, first_token=48)


def test_a_window_in_a_table_of_its_own_size_is_loaded_with_the_blocks_that_are_there(half):
    p, d = (half((16, 32), fill, [FULL, SLIDING]) for fill in (None, POISON))
    keys = p.cache.keys(range(320))
    p_tables, d_tables = tables_of(p, 320, 1), tables_of(d, 320, 2)
    for tables in (p_tables, d_tables):
        tables[1][:6] = [NO_BLOCK] * 6  # the last 80 tokens begin in the pool's fourth block
    assert p.pool.save(keys, p_tables).wait(10) == JobResult(320)
    assert d.pool.load(keys, d_tables).wait(10) == JobResult(320)
    for layer, first in ((0, 0), (1, 192)):
        got, want = (
            each.tokens(tables[layer], layer)[first:]
            for each, tables in ((d, d_tables), (p, p_tables))
        )
        assert torch.equal(got, want)
    d_tables[1][6] = NO_BLOCK
    with pytest.raises(LayoutError, match="a window begins inside a block of 64 tokens"):
        d.pool.load(keys, d_tables)


def test_a_load_that_falls_short_counts_by_the_tables_own_blocks(half, store):
    p, d = (half((16, 32), fill, [FULL, SLIDING]) for fill in (None, POISON))
    keys = p.cache.keys(range(320))
    p.pool.save(keys, tables_of(p, 320, 1)).wait(10)
    store.remove([keys.store_keys([Part(0, 0)])[3]])
    tables = tables_of(d, 320, 2)
    tables[1][:2] = [NO_BLOCK] * 2
    result = d.pool.load(keys, tables).wait(10)
    assert (result.num_tokens, result.reason) == (192, Reason.LOST)
    tables[1][:4] = [NO_BLOCK] * 4  # the 80 tokens before token 192 begin in the pool's block 1
    assert d.pool.load(keys, tables).wait(10).num_tokens == 0


def test_each_table_has_as_many_ids_as_it_needs_and_those_that_it_has(half):
    p = half(P_SIZES)
    keys = p.cache.keys(range(64))
    for tables, why in (
        ([[1] * 3, [1, 2]], "64 tokens need 4 engine blocks; 3 are given"),
        ([[1, 2, 3, 4], [1]], "64 tokens need 2 engine blocks; 1 are given"),
        ([[1, 2, 3, 40], [1, 40]], r"block ids 1\.\.40 are not all in the cache of 32 blocks"),
    ):
        with pytest.raises(LayoutError, match=why):
            p.pool.save(keys, tables)
    assert p.pool.save(keys, [[1, 2, 3, 40], [1, 31]]).wait(10).num_tokens == 64


def test_a_stage_asks_nothing_of_the_ids_of_a_table_of_which_it_has_no_layer(half):
    p = half(P_SIZES, layers=[FULL, MLA], pipeline=Pipeline((0, 1), stage=0))
    keys = p.cache.keys(range(64))
    assert p.pool.save(keys, [[1, 2, 3, 4], [1000, 1001]]).wait(10).num_tokens == 64


@pytest.mark.parametrize("native", ["off", "auto"])
def test_the_self_test_of_an_engine_fills_tables_of_two_sizes(native):
    layout = flat_layout(
        dtype="float32", rope="", layers=LAYERS, block_tokens=64, engine_block_tokens=P_SIZES
    )
    tried = self_test(settings_of(native=native), layout, caches_of(layout, 1), num_tokens=100)
    assert tried.num_bytes == 100 * sum(4 * s.num_kv_heads * s.channels for s in LAYERS)


def layout_with(sizes, layers=LAYERS, **more) -> Layout:
    return Layout.of(
        settings_of(), dtype="float32", layers=layers, engine_block_tokens=sizes, rope="", **more
    )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match=r"3 sizes of engine blocks are given: .* 2 block tables"):
        layout_with((16, 16, 16))
    with pytest.raises(LayoutError, match="must be a multiple of the engine's block of 48 tokens"):
        layout_with((16, 48))
    with pytest.raises(LayoutError, match="those that windows give back must have 32"):
        layout_with((32, 16), [FULL, SLIDING], boundary_tokens=32)
    assert layout_with((16, 32), [FULL, SLIDING], boundary_tokens=32).block_tokens == 32


@pytest.mark.parametrize(("freed", "fits"), [(16, False), (48, False), (32, True), (64, True)])
def test_a_window_may_give_back_several_entries_at_once(freed, fits):
    given = {"boundary_tokens": 32, "freed_tokens": freed}
    if fits:
        assert layout_with((16, 16), [FULL, SLIDING], **given).block_tokens == 32
    else:
        with pytest.raises(LayoutError, match="must have 32 or a multiple of it"):
            layout_with((16, 16), [FULL, SLIDING], **given)
