"""Layers that keep a state: it is stored by its end, and no prompt counts without it."""

from __future__ import annotations

import random

import pytest
import torch

from pdstore import JobResult, LayerSpec
from pdstore.engine.self_test import self_test
from pdstore.errors import LayoutError, Reason
from pdstore.format.block import HEADER_BYTES
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.keys import Part, PromptKeys
from pdstore.format.layout import Layout, Pipeline
from pdstore.format.plan import Announcement, SavePlan
from pdstore.store import open_store
from pdstore.testing.values import get
from pdstore.worker.values import PromptBlocks
from tests.support.kv import POISON, Instance, caches_of, eventually, settings_of
from tests.worker.test_mover import flip, plant

BLOCK, ROWS = 64, 16
CONV, SSM = LayerSpec.state(1000, "conv"), LayerSpec.state(3000, "ssm", table=1)
FULL = LayerSpec(2, 8, table=2)
LAYERS = [CONV, SSM, FULL, CONV, SSM, FULL]
"""States first, as vLLM numbers its tables."""
STATES, OF_FULL = (Part(0, 0), Part(1, 0)), Part(2, 0)
P_ROWS, D_ROWS = list(range(20, 50)), list(range(5, 35))[::-1]
URLS = ["memory://", "file://{}/pool", "shm://states?size=8MiB&dir={}"]


@pytest.fixture(params=URLS)
def store(request, tmp_path, closed_after):
    return closed_after(open_store(request.param.format(tmp_path), settings_of()))


@pytest.fixture
def half(store, closed_after):
    def half(fill=None, over=None, layers=LAYERS, **changes) -> Instance:
        given = {"layers": layers, "boundary_tokens": BLOCK, "num_blocks": (16, 24, 64), **changes}
        return closed_after(Instance(over or store, fill, **given))

    return half


def tables_of(rows, *ends, entry=1):
    """Block tables that have states only at some ends, in an entry of its own for each."""
    return [
        {end: entry + 2 * i for i, end in enumerate(ends)},
        {end: entry + 2 * i + 7 for i, end in enumerate(ends)},
        rows,
    ]


def save(p, num_tokens, *ends, first_token=0, **more):
    """Saves a prompt's tokens with the states at some ends. Entries: 1 and 8, then 3 and 10..."""
    keys = p.cache.keys(range(num_tokens))
    return p.pool.save(keys, tables_of(P_ROWS, *ends), first_token=first_token, **more).wait(10)


def load(d, tokens, *ends, first_token=0, **more):
    """Loads what a lookup finds of a prompt, with the state at its end; into entries 2 and 9."""
    found = d.cache.match(d.cache.keys(tokens))
    tables = tables_of(D_ROWS, *(ends or [found.num_tokens]), entry=2)
    return d.pool.load(found.keys, tables, first_token=first_token, **more).wait(10)


def assert_moved(p, d, num_tokens, p_entry=1, d_entry=2, first_token=0):
    """D has P's tokens from `first_token` on and one state, and its poison everywhere else."""
    for layer, spec in enumerate(LAYERS):
        if spec.is_state:
            ours, theirs = (entry + 7 * spec.table for entry in (d_entry, p_entry))
            assert torch.equal(d.caches[layer][ours], p.caches[layer][theirs])
            others = [i for i in range(len(d.caches[layer])) if i != ours]
            assert (d.caches[layer][others] == POISON).all()
            continue
        got, want = d.tokens(D_ROWS, layer), p.tokens(P_ROWS, layer)
        assert torch.equal(got[first_token:num_tokens], want[first_token:num_tokens])
        assert (got[:first_token] == POISON).all()
        assert (got[num_tokens:] == POISON).all()


def is_untouched(d) -> bool:
    return all((cache == POISON).all() for cache in d.caches)


@pytest.mark.parametrize(
    ("p_copies", "d_copies"), [("auto", "auto"), ("off", "auto"), ("auto", "off"), ("off", "off")]
)
@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_d_goes_on_from_ps_tokens_and_the_state_after_them(half, num_tokens, p_copies, d_copies):
    p, d = half(native=p_copies), half(POISON, native=d_copies)
    keys = p.cache.keys(range(num_tokens))
    handoff, params = p.cache.announce(keys)
    assert save(p, num_tokens, num_tokens, handoff=handoff) == JobResult(num_tokens)
    found = d.cache.lookup(d.cache.keys(range(num_tokens + 1)), params).wait(10)
    assert found.num_tokens == num_tokens, "P computes all tokens but the last"
    tables = tables_of(D_ROWS, num_tokens, entry=2)
    assert d.pool.load(found.keys, tables).wait(10) == JobResult(num_tokens)
    assert_moved(p, d, num_tokens)


@pytest.mark.parametrize("first", [0, 2, 30])
def test_no_value_is_made_of_a_state_that_is_not_there(half, monkeypatch, first):
    """In a long prompt these would be most of all values, and no load begins before it has them."""
    p, make_keys, made = half(), PromptKeys.store_keys, []
    keys = p.cache.keys(range(BLOCK * 40 + 9))
    states = {end: end // BLOCK for end in (64, 1920, 1984, keys.num_tokens)}
    monkeypatch.setattr(
        PromptKeys, "store_keys", lambda *of: made.append(make_keys(*of)) or made[-1]
    )
    values = PromptBlocks(p.layout, keys, [states, states, range(164)], first).values_from(first)
    ends = [(n, keys.end_of(n + 1)) for n in range(first, 41)]
    wanted = [(n, p) for n, end in ends for p in (*STATES, OF_FULL)[0 if end in states else 2 :]]
    assert [*zip(values.numbers, values.parts, strict=True)] == wanted
    assert values.keys == [make_keys(keys, [part], n, n + 1)[0] for n, part in wanted]
    assert [key for some in made for key in some] == values.keys


@pytest.mark.parametrize(("shared", "usable", "entry"), [(300, 256, 3), (200, 128, 1), (100, 0, 0)])
def test_another_prompt_goes_on_from_the_last_state_before_where_it_differs(
    half, shared, usable, entry
):
    """P leaves states after 128 and 256 tokens, where its steps end, and after the last."""
    p, d = half(), half(POISON)
    assert save(p, 400, 128, 256, 400) == JobResult(400)
    tokens = [*range(shared), *[7] * 100]
    assert d.cache.match(d.cache.keys(tokens)).num_tokens == usable
    if usable:
        assert load(d, tokens) == JobResult(usable)
        assert_moved(p, d, usable, p_entry=entry)


@pytest.mark.parametrize("seed", range(4))
def test_wherever_states_are_kept_d_goes_on_from_the_last_of_what_it_shares(half, seed):
    """Prompts, their states and what others share of them are drawn; each is one of its own."""
    chance = random.Random(seed)
    p, d = half(), half(POISON)
    for prompt in range(8):
        num_tokens = chance.randint(1, 400)
        ends = {n for n in range(BLOCK, num_tokens, BLOCK) if chance.random() < 0.5}
        ends = [*sorted(ends), num_tokens]
        tokens = [prompt + 7, *range(num_tokens - 1)]
        tables = tables_of(P_ROWS, *ends, entry=0)
        assert p.pool.save(p.cache.keys(tokens), tables).wait(10) == JobResult(num_tokens)
        shared = chance.randint(0, num_tokens)
        other = [*tokens[:shared], *[5] * chance.randint(0, 100)]
        common = num_tokens if other == tokens else shared // BLOCK * BLOCK
        usable = max((end for end in ends if end <= common), default=0)
        found = d.cache.match(d.cache.keys(other))
        assert found.num_tokens == usable
        if usable:
            entry = chance.randrange(16)
            into = [{usable: entry}, {usable: entry}, D_ROWS]
            first_token = chance.randrange(0, usable, ROWS)
            job = d.pool.load(found.keys, into, first_token=first_token)
            assert job.wait(10) == JobResult(usable)
            for layer, table in ((0, 0), (1, 1)):
                theirs = tables[table][usable]
                assert torch.equal(d.caches[layer][entry], p.caches[layer][theirs])
            got, want = (each.tokens(rows, 2) for each, rows in ((d, D_ROWS), (p, P_ROWS)))
            assert torch.equal(got[first_token:usable], want[first_token:usable])


def test_a_prompt_less_its_last_token_goes_on_from_an_earlier_state(half):
    """No token can be taken out of a state again."""
    p, d = half(), half(POISON)
    save(p, 300, 128, 256, 300)
    assert d.cache.match(d.cache.keys(range(299))).num_tokens == 256
    assert load(d, range(299)) == JobResult(256)
    assert_moved(p, d, 256, p_entry=3)


@pytest.mark.parametrize("lacking", STATES)
def test_nothing_counts_of_a_load_that_names_no_state_at_its_end(half, lacking):
    p, d = half(), half(POISON)
    save(p, 300, 128, 300)
    keys = d.cache.keys(range(300))
    tables = tables_of(D_ROWS, 128, 300)
    del tables[lacking.group][300]
    with pytest.raises(LayoutError, match=f"table {lacking.group} has no state after 300 tokens"):
        d.pool.load(keys, tables)
    assert is_untouched(d)


def test_nothing_is_stored_of_a_save_that_names_no_state_at_its_end(half, store):
    p = half()
    keys = p.cache.keys(range(300))
    handoff, _ = p.cache.announce(keys)
    for plan in (SavePlan(keys), SavePlan(keys, handoff=handoff), SavePlan(keys.prefix(256))):
        with pytest.raises(LayoutError, match="has no state after"):
            p.pool.begin_save(plan, tables_of(P_ROWS, 128))
    assert store.match(keys.store_keys([OF_FULL])) == 0


def test_a_hand_offs_tokens_may_be_stored_before_the_state_at_their_end(half):
    """They wait for no state that nobody loads: D's is that after the last token."""
    p, d = half(), half(POISON)
    keys = p.cache.keys(range(300))
    handoff, params = p.cache.announce(keys)
    early = p.pool.begin_save(SavePlan(keys.prefix(192), is_awaited=True), tables_of(P_ROWS))
    early.layers_done(len(LAYERS))
    assert early.job.wait(10) == JobResult(192)
    assert d.cache.match(keys).num_tokens == 0
    assert save(p, 300, 300, first_token=192, handoff=handoff) == JobResult(300)
    assert d.cache.lookup(d.cache.keys(range(301)), params).wait(10).num_tokens == 300
    assert load(d, range(300)) == JobResult(300)
    assert_moved(p, d, 300)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ([{64: 1}, [8], P_ROWS], "block table 1: a table of states is a mapping"),
        ([{64: 1}, {64: 8}, {64: 2}], "block table 2: a table of states is a mapping"),
        (tables_of(P_ROWS, 32, 64), "no block ends after 32 of 64 tokens"),
        (tables_of(P_ROWS, 64, 128), "no block ends after 128 of 64 tokens"),
        (tables_of(P_ROWS, 0, 64), "no block ends after 0 of 64 tokens"),
        ([{64: 1}, {64: 24}, P_ROWS], r"block ids 24\.\.24 are not all in the cache of 24"),
        ([{64: NO_BLOCK}, {64: 8}, P_ROWS], r"block ids -1\.\.-1 are not all in the cache of 16"),
        ([{64: None}, {64: 8}, P_ROWS], "block ids are ints"),
        ([{64: 1}, {64: 8}, P_ROWS[:3]], "64 tokens need 4 engine blocks; 3 are given"),
    ],
)
def test_tables_that_cannot_be_those_of_a_prompt_are_refused(half, tables, why):
    p = half()
    keys = p.cache.keys(range(64))
    for job in (p.pool.save, p.pool.load):
        with pytest.raises(LayoutError, match=why):
            job(keys, tables)


def test_an_entry_that_later_steps_overwrite_is_never_stored_for_two_ends(half, store):
    """An engine that keeps only a prompt's last state has one entry for all of its tokens."""
    p = half()
    keys = p.cache.keys(range(128))
    with pytest.raises(LayoutError, match="block table 0 names an entry for two ends"):
        p.pool.save(keys, [{64: 5, 128: 5}, {64: 8, 128: 9}, P_ROWS])
    assert p.pool.save(keys, [{128: 5}, {128: 5}, P_ROWS]).wait(10) == JobResult(128)
    assert store.match(keys.prefix(64).store_keys(STATES)) == 0, "it was overwritten since then"
    assert p.cache.match(keys).num_tokens == 128


def test_a_save_keeps_the_state_as_it_was_when_it_was_captured(half):
    p, d = half(), half(POISON)
    job = p.pool.save(p.cache.keys(range(100)), tables_of(P_ROWS, 100))
    eventually(lambda: job.captured)
    before = [cache.clone() for cache in p.caches]
    for cache in p.caches:
        cache.fill_(0)
    job.wait(10)
    p.caches[:] = before
    assert load(d, range(100)) == JobResult(100)
    assert_moved(p, d, 100)


@pytest.mark.parametrize(("first_token", "entry"), [(16, 2), (32, 2), (256, 2), (272, 2)])
def test_a_load_that_begins_inside_a_block_brings_the_state_at_its_end(half, first_token, entry):
    p, d = half(), half(POISON)
    save(p, 300, 300)
    assert load(d, range(300), first_token=first_token) == JobResult(300)
    assert_moved(p, d, 300, first_token=first_token)


@pytest.mark.parametrize(
    ("ends", "first_token", "num_tokens"),
    [((300,), 0, 0), ((300,), 64, 64), ((128, 300), 0, 128), ((128, 300), 192, 192)],
)
@pytest.mark.parametrize("part", STATES)
def test_a_load_whose_state_is_lost_counts_up_to_an_end_that_has_one(
    half, store, part, ends, first_token, num_tokens
):
    """Or only what the engine has already: it cannot go on from any other end."""
    p, d = half(), half(POISON)
    save(p, 300, 128, 300)
    keys = p.cache.keys(range(300))
    store.remove(keys.store_keys([part])[-1:])
    result = d.pool.load(keys, tables_of(D_ROWS, *ends, entry=2), first_token=first_token)
    assert result.wait(10) == JobResult(num_tokens, Reason.LOST)
    if num_tokens == 128:
        for layer in (0, 1):
            entry = 7 * layer
            assert torch.equal(d.caches[layer][entry + 2], p.caches[layer][entry + 1])


@pytest.mark.requirement("C16", "length and checksum of a value are checked before use")
@pytest.mark.parametrize("part", STATES)
def test_a_wrong_state_is_a_miss_is_removed_and_heals(half, store, part):
    p, d = half(), half(POISON)
    save(p, 300, 128, 300)
    keys = p.cache.keys(range(300))
    name = keys.store_keys([part])[-1]
    size = HEADER_BYTES + p.layout.payload_bytes(part, 300 % BLOCK)
    plant(store, name, flip(get(store, [name], [size])[0], HEADER_BYTES + 7))
    result = d.pool.load(keys, tables_of(D_ROWS, 300, entry=2)).wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.CORRUPT)
    assert store.match([name]) == 0
    assert d.cache.match(keys).num_tokens == 128, "the state before it is right"
    assert save(p, 300, 128, 300) == JobResult(300)
    assert load(d, range(300)) == JobResult(300)
    assert_moved(p, d, 300, p_entry=3)


def test_a_save_brings_a_state_again_that_the_store_has_lost(half, store):
    """A hand-off's end matches the whole prompt; D waits for no state that is gone."""
    p, d = half(), half(POISON)
    save(p, 300, 128, 300)
    keys = p.cache.keys(range(300))
    store.remove(keys.store_keys(STATES)[-2:])
    handoff, _ = p.cache.announce(keys)
    assert save(p, 300, 128, 300, first_token=300, handoff=handoff) == JobResult(300)
    assert load(d, range(300)) == JobResult(300)
    assert_moved(p, d, 300, p_entry=3)


@pytest.mark.parametrize(
    "url", ["memory://?budget={}&lease=600", "file://{dir}?budget={}&lease=600"]
)
def test_a_full_store_makes_room_for_a_hand_offs_states(url, tmp_path, closed_after):
    """They are most of its bytes: four prompts fill the store; room for the tokens would not do."""
    store = closed_after(open_store(url.format(200_000, dir=tmp_path), settings_of()))
    layers = [LayerSpec.state(20_000, "conv"), LayerSpec.state(20_000, "ssm", table=1), FULL]
    given = {"layers": layers, "boundary_tokens": BLOCK}
    p, d = (closed_after(Instance(store, fill, **given)) for fill in (None, POISON))
    for first in range(1000, 1010):
        keys = p.cache.keys([first])
        p.pool.save(keys, tables_of(P_ROWS, 1)).wait(10)
        p.cache.match(keys)  # leases it
    keys = p.cache.keys(range(65))
    assert save(p, 65, 65).reason in (Reason.STORE_FULL, Reason.NOT_ADMITTED)
    handoff, params = p.cache.announce(keys)
    assert save(p, 65, 65, handoff=handoff) == JobResult(65)
    assert d.cache.lookup(d.cache.keys(range(66)), params).wait(10).num_tokens == 65
    assert load(d, range(65)) == JobResult(65)
    for layer in (0, 1):
        assert torch.equal(d.caches[layer][2 + 7 * layer], p.caches[layer][1 + 7 * layer])


def test_d_loads_tokens_while_p_computes_and_the_state_when_p_stores_it(half):
    """In two layer ranges: a range's state is the last value that it waits for."""
    p, d = (half(fill, layer_ranges=2, range_bytes=1) for fill in (None, POISON))
    keys = p.cache.keys(range(300))
    handoff, params = p.cache.announce(keys)
    announce = Announcement(handoff, 300)
    begun = SavePlan(keys.prefix(128), is_awaited=True, announce=announce)
    early = p.pool.begin_save(begun, tables_of(P_ROWS, 128))
    early.layers_done(len(LAYERS))
    found = d.cache.follow(d.cache.keys(range(301)), params).wait(10)
    assert (found.num_tokens, found.follow) == (300, handoff)
    tables = tables_of(D_ROWS, 300, entry=2)
    job = d.pool.load(found.keys, tables, follow=found.follow)
    eventually(lambda: torch.equal(d.tokens(D_ROWS, 5)[:128], p.tokens(P_ROWS, 5)[:128]))
    assert not job.done
    assert save(p, 300, 300, first_token=128, handoff=handoff) == JobResult(300)
    assert job.wait(10) == JobResult(300)
    assert_moved(p, d, 300)


def test_a_followed_load_whose_state_never_comes_counts_nothing(half):
    p, d = half(), half(POISON)
    keys = p.cache.keys(range(300))
    handoff, _ = p.cache.announce(keys)
    job = d.pool.load(keys, tables_of(D_ROWS, 300, entry=2), follow=handoff)
    rows = p.pool.begin_save(SavePlan(keys, is_awaited=True), tables_of(P_ROWS))
    rows.layers_done(len(LAYERS))
    assert rows.job.wait(10) == JobResult(300)
    p.pool.abort_handoff(handoff)
    assert job.wait(10) == JobResult(0, Reason.HANDOFF_FAILED)


SHARED = LayerSpec.state(500, "each rank has all of it", table=1, is_whole=True)
ON_RANKS = [LayerSpec.state(1000, "conv", ranks=2), SHARED, FULL]


def test_two_ranks_have_their_own_parts_of_a_state(half, store):
    """A hand-off is over when both have stored theirs; a part that is lost is a miss for both."""
    given = {"layers": ON_RANKS}
    ps, ds = ([half(fill, rank=(n, 2), **given) for n in range(2)] for fill in (None, POISON))
    ps[1].caches[1].copy_(ps[0].caches[1])
    keys = ps[0].cache.keys(range(100))
    handoff, params = ps[0].cache.announce(keys)
    lookup = ds[0].cache.lookup(ds[0].cache.keys(range(101)), params)
    for p in ps:
        assert lookup.poll() is None
        assert p.pool.save(keys, tables_of(P_ROWS, 100), handoff=handoff).wait(10) == JobResult(100)
    found = lookup.wait(10)
    assert found.num_tokens == 100
    for p, d in zip(ps, ds, strict=True):
        assert d.pool.load(found.keys, tables_of(D_ROWS, 100, entry=2)).wait(10) == JobResult(100)
        for layer, (theirs, ours) in enumerate([(1, 2), (8, 9)]):
            assert torch.equal(d.caches[layer][ours], p.caches[layer][theirs])
        assert torch.equal(d.tokens(D_ROWS, 2)[:100], p.tokens(P_ROWS, 2)[:100])
    store.remove(keys.store_keys([Part(0, 1)]))
    assert ds[0].cache.match(keys).num_tokens == 0
    results = [d.pool.load(keys, tables_of(D_ROWS, 100, entry=2)).wait(10) for d in ds]
    assert results == [JobResult(100), JobResult(0, Reason.LOST)]


def test_ranks_that_split_a_state_in_another_way_share_no_namespace(half):
    """And fewer shards than ranks, or more, are refused: nobody can cut a state."""
    two = half(layers=ON_RANKS, rank=(0, 2)).namespace
    one = half(layers=[LayerSpec.state(2000, "conv"), SHARED, FULL]).namespace
    assert two.digest != one.digest
    with pytest.raises(
        LayoutError, match="give P and D the same TP size, and do not set PDSTORE_KV"
    ):
        half(layers=ON_RANKS, rank=(0, 2), kv_shards=4)


def test_a_stage_without_states_moves_the_tokens_of_its_own_layers(half):
    """The tables are those of the whole model; nothing is asked of another stage's entries."""
    layers = [CONV, SSM, FULL, FULL]
    pipeline = Pipeline((0, 0, 1, 1), stage=1)
    p, d = (half(f, layers=layers, layer_ranges=2, pipeline=pipeline) for f in (None, POISON))
    keys = p.cache.keys(range(100))
    tables = [{100: 999}, {100: 999}]
    assert p.pool.save(keys, [*tables, P_ROWS]).wait(10) == JobResult(100)
    assert d.pool.load(keys, [*tables, D_ROWS]).wait(10) == JobResult(100)
    for layer in (0, 1):
        assert torch.equal(d.tokens(D_ROWS, layer)[:100], p.tokens(P_ROWS, layer)[:100])


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("num_tokens", [5, 64, 100])
def test_the_self_test_of_an_engine_fills_tables_of_states(native, num_tokens):
    layout = layout_of(LAYERS)
    caches = caches_of(layout, 1)
    tried = self_test(settings_of(native=native), layout, caches, num_tokens=num_tokens)
    assert tried.num_bytes == num_tokens * 2 * 2 * 16 * 4 + 2 * (1000 + 3000)


def test_the_self_test_of_a_rank_asks_for_what_this_rank_stores():
    for rank in range(2):
        layout = layout_of(ON_RANKS, tp_rank=rank, tp_size=2)
        tried = self_test(settings_of(), layout, caches_of(layout, 1), num_tokens=100)
        assert tried.num_bytes == 100 * 16 * 4 + 1000 + 500


def layout_of(layers, **more) -> Layout:
    return Layout.of(
        settings_of(), dtype="float32", layers=layers, engine_block_tokens=ROWS, rope="", **more
    )
