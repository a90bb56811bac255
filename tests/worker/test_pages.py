"""Layers with pages, as an indexer's that end with their scales: each page is moved whole."""

from __future__ import annotations

import pytest
import torch

from pdstore import JobResult, LayerSpec
from pdstore.engine.self_test import self_test
from pdstore.errors import Reason
from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import Part
from pdstore.format.layout import Layout
from pdstore.format.plan import SavePlan
from pdstore.store import open_store
from pdstore.testing.values import get
from tests.support.kv import POISON, Instance, caches_of, eventually, settings_of
from tests.worker.test_mover import flip, plant

TOKENS, ROW, SCALE = 64, 128, 4
PAGE_BYTES = TOKENS * (ROW + SCALE)
FULL, MLA = LayerSpec(2, 8), LayerSpec.latent(24)
PAGE = LayerSpec.page(PAGE_BYTES, TOKENS, "rows of fp8, scales of float32")
LAYERS = [PAGE, MLA, PAGE, MLA]
OF_PAGES = Part(0, 0)
P_ROWS, D_ROWS = list(range(20, 30)), list(range(3, 13))[::-1]
URLS = ["memory://", "file://{}/pool", "shm://pages?size=8MiB&dir={}"]


@pytest.fixture(params=URLS)
def store(request, tmp_path, closed_after):
    return closed_after(open_store(request.param.format(tmp_path), settings_of()))


@pytest.fixture
def half(store, closed_after):
    def half(fill=None, layers=LAYERS, **changes) -> Instance:
        given = {"layers": layers, "engine_block_tokens": TOKENS, **changes}
        return closed_after(Instance(store, fill, **given))

    return half


def save(p, num_tokens, **more):
    return p.pool.save(p.cache.keys(range(num_tokens)), P_ROWS, **more).wait(10)


def load(d, num_tokens, **more):
    found = d.cache.match(d.cache.keys(range(num_tokens)))
    return d.pool.load(found.keys, D_ROWS, **more).wait(10)


def rows_and_scales(one, pages, layer):
    """Returns what the kernels of an indexer read of pages: a row and a scale of each token."""
    taken = one.caches[layer][pages].flatten(1).view(torch.uint8)
    rows, scales = taken[:, : TOKENS * ROW], taken[:, TOKENS * ROW :]
    return rows.reshape(-1, ROW), scales.reshape(-1, SCALE)


def assert_moved(p, d, num_tokens):
    """D has P's tokens, all of the pages that hold some, and its poison everywhere else."""
    used = -(-num_tokens // TOKENS)
    for layer, spec in enumerate(LAYERS):
        if not spec.is_page:
            got, want = d.tokens(D_ROWS, layer), p.tokens(P_ROWS, layer)
            assert torch.equal(got[:num_tokens], want[:num_tokens])
            assert (got[num_tokens:] == POISON).all()
            continue
        at_d, at_p = D_ROWS[:used], P_ROWS[:used]
        of_both = zip(rows_and_scales(d, at_d, layer), rows_and_scales(p, at_p, layer), strict=True)
        for got, want in of_both:
            assert torch.equal(got[:num_tokens], want[:num_tokens])
        assert torch.equal(d.caches[layer][at_d], p.caches[layer][at_p])
        others = [i for i in range(len(d.caches[layer])) if i not in at_d]
        assert (d.caches[layer][others] == POISON).all()


@pytest.mark.parametrize(
    ("p_copies", "d_copies"), [("auto", "auto"), ("off", "auto"), ("auto", "off"), ("off", "off")]
)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 100, 300])
def test_d_gets_every_row_and_every_scale_and_a_tail_carries_its_page(
    half, num_tokens, p_copies, d_copies
):
    p, d = half(native=p_copies), half(POISON, native=d_copies)
    keys = p.cache.keys(range(num_tokens))
    handoff, params = p.cache.announce(keys)
    assert save(p, num_tokens, handoff=handoff) == JobResult(num_tokens)
    found = d.cache.lookup(d.cache.keys(range(num_tokens)), params).wait(10)
    assert d.pool.load(found.keys, D_ROWS).wait(10) == JobResult(num_tokens)
    assert_moved(p, d, num_tokens)


def test_a_tail_of_pages_that_are_taken_for_mla_has_no_scales(half):
    """The control: its tokens' bytes are the first of the page, and the scales are the last."""
    p, d = (half(fill, layers=[LayerSpec.latent((ROW + SCALE) // 4)]) for fill in (None, POISON))
    assert save(p, 36) == load(d, 36) == JobResult(36)
    (got_rows, got), (rows, scales) = (
        rows_and_scales(one, pages[:1], 0) for one, pages in ((d, D_ROWS), (p, P_ROWS))
    )
    assert torch.equal(got_rows[:36], rows[:36])
    assert not (got[:36] == scales[:36]).all(1).any()


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (64, 1), (65, 2), (128, 2)])
def test_a_block_of_several_pages_has_those_that_hold_its_tokens(half, num_tokens, num_pages):
    p, d = (half(fill, block_tokens=2 * TOKENS) for fill in (None, POISON))
    assert p.layout.payload_bytes(OF_PAGES, num_tokens) == 2 * num_pages * PAGE_BYTES
    assert save(p, 128 + num_tokens) == JobResult(128 + num_tokens)
    assert load(d, 128 + num_tokens) == JobResult(128 + num_tokens)
    assert_moved(p, d, 128 + num_tokens)


@pytest.mark.parametrize("first_token", [64, 128, 192])
def test_a_load_brings_the_pages_behind_those_that_the_engine_has(half, first_token):
    """It may begin inside a block, and layers beside it have smaller engine blocks in a table."""
    layers = [FULL, LayerSpec.page(PAGE_BYTES, TOKENS, "rows, scales", table=1)]
    given = {"layers": layers, "engine_block_tokens": (16, TOKENS), "block_tokens": 2 * TOKENS}
    p, d = (half(fill, **given) for fill in (None, POISON))
    ours, theirs = [range(16), D_ROWS], [range(30, 46), P_ROWS]
    keys = p.cache.keys(range(250))
    assert p.pool.save(keys, theirs).wait(10) == JobResult(250)
    assert d.pool.load(keys, ours, first_token=first_token).wait(10) == JobResult(250)
    got, want = d.tokens(ours[0]), p.tokens(theirs[0])
    assert torch.equal(got[first_token:250], want[first_token:250])
    assert (got[:first_token] == POISON).all()
    first = first_token // TOKENS
    assert torch.equal(d.caches[1][D_ROWS[first:4]], p.caches[1][P_ROWS[first:4]])
    assert (d.caches[1][D_ROWS[:first]] == POISON).all()


@pytest.mark.requirement("C16", "length and checksum of a value are checked before use")
@pytest.mark.parametrize("num_tokens", [36, 64])
def test_one_wrong_bit_of_a_scale_is_a_miss_that_heals(half, store, num_tokens):
    p, d = half(), half(POISON)
    save(p, 64 + num_tokens)
    name = p.cache.keys(range(64 + num_tokens)).store_keys([OF_PAGES])[1]
    size = HEADER_BYTES + 2 * PAGE_BYTES
    plant(store, name, flip(get(store, [name], [size])[0], size - 1))
    assert load(d, 64 + num_tokens) == JobResult(64, Reason.CORRUPT)
    assert store.match([name]) == 0
    assert save(p, 64 + num_tokens) == JobResult(64 + num_tokens)
    assert load(d, 64 + num_tokens) == JobResult(64 + num_tokens)
    assert_moved(p, d, 64 + num_tokens)


def test_d_loads_pages_while_p_computes_the_layers_behind_them(half):
    p, d = (half(fill, layer_ranges=2, range_bytes=1) for fill in (None, POISON))
    keys = p.cache.keys(range(300))
    handoff, _ = p.cache.announce(keys)
    job = d.pool.load(d.cache.keys(range(300)), D_ROWS, follow=handoff)
    saving = p.pool.begin_save(SavePlan(keys, handoff=handoff), P_ROWS)
    saving.layers_done(2)
    eventually(lambda: torch.equal(d.caches[0][D_ROWS[:5]], p.caches[0][P_ROWS[:5]]))
    assert not job.done
    saving.layers_done(4)
    assert job.wait(10) == JobResult(300)
    assert_moved(p, d, 300)


def test_each_rank_loads_the_page_that_the_first_of_them_has_stored(half):
    """All ranks have it whole; the page of a later saver, other here, is not stored."""
    layers = [FULL, PAGE]
    ps, ds = ([half(fill, layers=layers, rank=(n, 2)) for n in range(2)] for fill in (None, POISON))
    keys = ps[0].cache.keys(range(100))
    handoff, params = ps[0].cache.announce(keys)
    lookup = ds[0].cache.lookup(ds[0].cache.keys(range(100)), params)
    for p in ps:
        assert lookup.poll() is None
        assert p.pool.save(keys, P_ROWS, handoff=handoff).wait(10) == JobResult(100)
    found = lookup.wait(10)
    assert found.num_tokens == 100
    for p, d in zip(ps, ds, strict=True):
        assert d.pool.load(found.keys, D_ROWS).wait(10) == JobResult(100)
        assert torch.equal(d.tokens(D_ROWS)[:100], p.tokens(P_ROWS)[:100])
        assert torch.equal(d.caches[1][D_ROWS[:2]], ps[0].caches[1][P_ROWS[:2]])


@pytest.mark.parametrize("native", ["off", "auto"])
def test_the_self_test_of_an_engine_compares_whole_pages(native):
    layout = Layout.of(
        settings_of(), dtype="float32", layers=[PAGE, MLA], engine_block_tokens=TOKENS, rope=""
    )
    _, mla = caches_of(layout, 1)
    pages = torch.zeros(1, TOKENS, ROW + SCALE, dtype=torch.uint8)
    tried = self_test(settings_of(native=native), layout, [pages, mla], num_tokens=100)
    assert tried.num_bytes == 2 * PAGE_BYTES + 100 * 24 * 4
