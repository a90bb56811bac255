"""Several block tables, sliding windows, and caches of pages: what P leaves D finds."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from pdstore import KVPool, LayerSpec, Layout, PromptKeys, Reason
from pdstore.errors import LayoutError
from pdstore.format.continuation import NO_BLOCK
from tests.support.kv import POISON, caches_of, settings_of

WINDOW, BLOCK = 40, 16
FULL = LayerSpec(2, 8)
SLIDING = LayerSpec(2, 8, window=WINDOW, table=1)
FULL_IDS, SLIDING_IDS = list(range(20, 40)), list(range(40, 60))


@pytest.fixture
def half(instance):
    def make(layers, fill=None, **more):
        return instance(fill, layers=layers, block_tokens=BLOCK, **more)

    return make


def behind(ids: list[int], num_tokens: int) -> list[int]:
    """The table of a sliding layer when `num_tokens` are computed: older blocks are given back."""
    first = max(0, num_tokens - WINDOW) // BLOCK
    return [NO_BLOCK if i < first else id for i, id in enumerate(ids)]


@pytest.mark.parametrize("num_tokens", [5, 40, 48, 57, 100, 160])
def test_d_needs_of_a_sliding_layer_only_the_window_that_p_still_holds(half, num_tokens):
    p, d = half([FULL, SLIDING]), half([FULL, SLIDING], fill=POISON)
    keys = p.cache.keys(range(num_tokens))
    tables = [FULL_IDS, behind(SLIDING_IDS, num_tokens)]
    attempt, _ = p.cache.announce(keys)
    assert p.pool.save(keys, tables, handoff=attempt).wait(10).num_tokens == num_tokens
    found = d.cache.match(d.cache.keys(range(num_tokens)))
    assert (found.num_tokens, found.reason) == (num_tokens, None)
    assert d.pool.load(found.keys, tables).wait(10).num_tokens == num_tokens
    start = max(0, num_tokens - WINDOW)
    for layer, ids, first in ((0, FULL_IDS, 0), (1, SLIDING_IDS, start)):
        got, want = (each.tokens(ids, layer)[first:num_tokens] for each in (d, p))
        assert torch.equal(got, want)
    held = [id for id in tables[1] if id != NO_BLOCK]
    rest = [i for i in range(d.caches[1].shape[0]) if i not in held]
    assert (d.caches[1][rest] == POISON).all(), "nothing is written where there is no block"


def test_a_gap_in_the_window_ends_the_prompt_before_it(half, store):
    p = half([FULL, SLIDING])
    keys = p.cache.keys(range(160))
    p.pool.save(keys, [FULL_IDS, SLIDING_IDS]).wait(10)
    sliding = [part for part in p.layout.parts if part.group == 1]
    names = keys.store_keys(sliding)
    store.remove([names[8]])
    assert p.cache.match(keys).num_tokens == 8 * BLOCK
    store.remove([names[6], names[4], names[2]])
    assert p.cache.match(keys).num_tokens == 2 * BLOCK, "the window before block 2 is whole"


def short_load(half, store, lost, tables, first_token=0):
    """Loads 160 tokens of which one block of the full layer was evicted after the match."""
    p, d = half([FULL, SLIDING]), half([FULL, SLIDING], fill=POISON)
    keys = p.cache.keys(range(160))
    assert p.pool.save(keys, [FULL_IDS, SLIDING_IDS]).wait(10).num_tokens == 160
    full = [part for part in p.layout.parts if part.group == 0]
    store.remove([keys.store_keys(full)[lost]])
    result = d.pool.load(keys, tables, first_token=first_token).wait(10)
    assert result.reason is Reason.LOST
    for layer, ids in ((0, FULL_IDS), (1, SLIDING_IDS)):
        seen = max(first_token, result.num_tokens - WINDOW) if layer else first_token
        got, want = (each.tokens(ids, layer)[seen : result.num_tokens] for each in (d, p))
        assert torch.equal(got, want), "all that the next token sees is there"
    return result.num_tokens


ALL = [FULL_IDS, SLIDING_IDS]
MOVED_ON = [FULL_IDS, behind(SLIDING_IDS, 160)]
FROM_64 = [FULL_IDS, [NO_BLOCK] * 4 + SLIDING_IDS[4:]]


@pytest.mark.parametrize(
    ("tables", "first_token", "lost", "end"),
    [
        *[(MOVED_ON, 0, lost, 0) for lost in (0, 5, 9)],  # a smaller end's window was not lent
        *[(ALL, 0, lost, 16 * lost) for lost in (0, 2, 9)],
        *[(FROM_64, 64, *end) for end in ((8, 128), (7, 112), (6, 64), (5, 64))],
    ],
)
def test_a_load_that_falls_short_counts_up_to_the_last_end_whose_window_was_lent(
    half, store, tables, first_token, lost, end
):
    """No engine can go on from an end before which a window lacks a block."""
    assert short_load(half, store, lost, tables, first_token) == end


def test_a_full_layer_has_a_block_for_every_token(half):
    p = half([FULL, SLIDING])
    keys = p.cache.keys(range(64))
    with pytest.raises(LayoutError, match="block ids -1"):
        p.pool.save(keys, [[NO_BLOCK] * 4, SLIDING_IDS])
    with pytest.raises(LayoutError, match="1 block tables; the layout has 2"):
        p.pool.save(keys, FULL_IDS)


def test_a_table_that_a_full_layer_shares_with_a_sliding_one_has_a_block_for_every_token(half):
    """Else the load would count tokens of which the full layer has nothing."""
    p = half([FULL, SLIDING, dataclasses.replace(FULL, table=1)])
    with pytest.raises(LayoutError, match="block ids -1"):
        p.pool.load(p.cache.keys(range(160)), [FULL_IDS, behind(SLIDING_IDS, 160)])


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 100])
def test_pages_come_back_whole_with_their_tail(half, num_tokens):
    p, d = (half([FULL, FULL], fill=fill, page="packed") for fill in (None, POISON))
    keys = p.cache.keys(range(num_tokens))
    assert p.pool.save(keys, FULL_IDS).wait(10).num_tokens == num_tokens
    found = d.cache.match(keys)
    assert d.pool.load(found.keys, SLIDING_IDS).wait(10).num_tokens == num_tokens
    used = -(-num_tokens // BLOCK)
    for layer in range(2):
        got, want = d.caches[layer][SLIDING_IDS[:used]], p.caches[layer][FULL_IDS[:used]]
        assert torch.equal(got, want), "a page has what is behind the tail too"
    assert (d.caches[0][:40] == POISON).all()


def test_a_salt_and_pages_are_refused_together():
    with pytest.raises(LayoutError, match="PDSTORE_SALT"):
        Layout.of(
            settings_of(salt="s"),
            dtype="float32",
            layers=[FULL],
            engine_block_tokens=BLOCK,
            rope="",
            page="x",
        )


def test_a_block_that_reaches_over_a_windows_edge_is_never_loaded_in_part(store):
    settings = settings_of(block_tokens=4 * BLOCK)
    layout = Layout.of(
        settings, dtype="float32", layers=[FULL, SLIDING], engine_block_tokens=BLOCK, rope=""
    )
    namespace = layout.namespace(settings, weights="w")
    with contextlib.closing(
        KVPool(settings, layout, caches_of(layout), namespace, store=store)
    ) as pool:
        keys = PromptKeys(namespace).extend(range(160))
        with pytest.raises(LayoutError, match="a window begins inside a block of 64 tokens"):
            pool.load(keys, [FULL_IDS, behind(SLIDING_IDS, 160)])
        edge = [NO_BLOCK] * 4 + SLIDING_IDS[4:]
        assert pool.load(keys, [FULL_IDS, edge]).wait(10).reason is Reason.LOST


def test_the_pools_block_is_the_engines_where_blocks_behind_a_window_are_given_back():
    layout = Layout.of(
        settings_of(block_tokens=4 * BLOCK),
        dtype="float32",
        layers=[FULL, SLIDING],
        engine_block_tokens=BLOCK,
        rope="",
        boundary_tokens=16,
    )
    assert layout.block_tokens == BLOCK
