"""Drafts: a draft model's KV is loaded where it is stored, and nothing depends on it."""

from __future__ import annotations

from dataclasses import replace
from threading import Event

import pytest
import torch

from pdstore import EngineRequest, JobResult, LayerSpec, SavePlan
from pdstore.engine.job_end import JobEnd
from pdstore.engine.self_test import self_test
from pdstore.errors import LayoutError, Reason, StoreError, StoreFull
from pdstore.format.block import HEADER_BYTES
from pdstore.format.handoff import HandoffId, new_id
from pdstore.format.keys import Part
from pdstore.store import open_store
from pdstore.testing.values import get, put
from tests.support.kv import POISON, Instance, settings_of

FULL = LayerSpec(2, 8)
DRAFT = replace(FULL, optional=True)
PLAIN = (FULL,) * 3
DRAFTING = (*PLAIN, DRAFT)
MODEL = range(3)
LAST = 3
BLOCK = 64
VALUE_BYTES = HEADER_BYTES + BLOCK * 2 * 16 * 4
NUM_TOKENS = 230
TOKENS = range(NUM_TOKENS)
"""Three whole blocks and a tail."""
HERE, THERE = range(20, 40), range(2, 22)
URLS = ["memory://", "file://{}/pool", "shm://drafts?size=8MiB&dir={}"]


@pytest.fixture(params=URLS)
def store(request, tmp_path, closed_after):
    return closed_after(open_store(request.param.format(tmp_path), settings_of()))


@pytest.fixture
def half(store, closed_after):
    """Makes an instance: `half(drafts=True)` speculates. D's cache is filled with poison."""

    def half(fill=None, *, drafts=True, **changes) -> Instance:
        given = {"layers": DRAFTING if drafts else PLAIN, "draft": "one" if drafts else ""}
        return closed_after(Instance(store, fill, **{"block_tokens": BLOCK, **given, **changes}))

    return half


def save(p, tokens=TOKENS, **given):
    """Saves a prompt; its plan may have other fields than the default."""
    opened = p.pool.begin_save(SavePlan(p.cache.keys(tokens), **given), HERE)
    opened.layers_done(len(p.layout.held_layers))
    return opened.job.wait(20)


def load(d, tokens=TOKENS, **given):
    found = d.cache.match(d.cache.keys(tokens))
    job = d.pool.load(found.keys, THERE, **given)
    job.wait(20)
    return job


def rows(half, ids, layer, stop=NUM_TOKENS, start=0):
    return half.tokens(ids, layer)[start:stop]


def check_model(p, d, stop=NUM_TOKENS):
    for layer in MODEL:
        assert torch.equal(rows(p, HERE, layer, stop), rows(d, THERE, layer, stop))


def check_draft(p, d, warm, stop=NUM_TOKENS):
    """Checks that D has the first `warm` rows of the draft, and no row of another block."""
    if warm:
        assert torch.equal(rows(p, HERE, LAST, warm), rows(d, THERE, LAST, warm))
    assert (rows(d, THERE, LAST, stop, warm) == POISON).all()


def draft_keys(one, tokens=TOKENS):
    return one.cache.keys(tokens).store_keys([Part(1, 0)])


def stored(store, keys):
    return [store.match([key]) == 1 for key in keys]


def handoff_of(one, tokens=TOKENS):
    return one.cache.announce(one.cache.keys(tokens))[0]


@pytest.mark.parametrize("at_p", [True, False], ids=["P drafts", "P plain"])
@pytest.mark.parametrize("at_d", [True, False], ids=["D drafts", "D plain"])
@pytest.mark.parametrize("ranges", [1, 3])
def test_all_four_pairs_share_the_model_s_kv(half, store, at_p, at_d, ranges):
    p, d = half(drafts=at_p, layer_ranges=ranges), half(POISON, drafts=at_d, layer_ranges=ranges)
    assert p.namespace.digest == d.namespace.digest
    assert save(p, handoff=handoff_of(p)) == JobResult(230)
    job = load(d)
    assert job.result == JobResult(230)
    check_model(p, d)
    if at_d:
        check_draft(p, d, 230 if at_p else 0)
    assert job.num_with_drafts == (230 if at_p or not at_d else 0)


def test_a_draft_of_another_revision_is_never_met(half):
    p, d = half(), half(POISON, draft="other")
    assert save(p) == load(d).result == JobResult(230)
    check_draft(p, d, 0)


@pytest.mark.parametrize("gap", range(4))
def test_drafts_end_at_their_first_gap(half, store, gap):
    """The tail is a block as any other."""
    p, d = half(), half(POISON)
    save(p)
    store.remove(draft_keys(p)[gap : gap + 1])
    job = load(d)
    assert job.result == JobResult(230)
    assert job.num_with_drafts == BLOCK * gap
    check_model(p, d)
    check_draft(p, d, BLOCK * gap)


def test_a_damaged_draft_is_removed_and_only_the_draft_is_cold(half, store):
    p, d = half(), half(POISON, role="decode")
    save(p)
    [name] = draft_keys(p)[1:2]
    value = bytearray(get(store, [name], [VALUE_BYTES])[0])
    value[100] ^= 1
    store.remove([name])
    put(store, [name], [bytes(value)])
    job = load(d)
    assert job.result == JobResult(230)
    assert job.num_with_drafts == BLOCK
    check_model(p, d)
    assert stored(store, draft_keys(p)) == [True, False, True, True]


def test_a_gap_of_the_model_leaves_the_drafts_before_it(half, store):
    p, d = half(), half(POISON)
    save(p)
    found = d.cache.match(d.cache.keys(TOKENS))
    store.remove(p.cache.keys(TOKENS).store_keys(p.layout.parts)[2:3])
    job = d.pool.load(found.keys, THERE)
    assert job.wait(20).num_tokens == 2 * BLOCK
    assert job.num_with_drafts <= 2 * BLOCK
    check_model(p, d, 2 * BLOCK)


def test_a_load_from_inside_a_block_takes_the_drafts_from_there(half):
    p, d = half(), half(POISON)
    save(p)
    job = load(d, first_token=80)
    assert job.result == JobResult(230)
    assert job.num_with_drafts == 230
    assert (rows(d, THERE, LAST, 80) == POISON).all()
    assert torch.equal(rows(p, HERE, LAST, 230, 80), rows(d, THERE, LAST, 230, 80))


@pytest.mark.parametrize("start", [0, 1, BLOCK, 100, 200, 230])
def test_a_save_leaves_out_blocks_with_rows_of_earlier_requests(half, store, start):
    p = half()
    assert save(p, handoff=handoff_of(p), drafts_from=start) == JobResult(230)
    first = -(-start // BLOCK)
    assert stored(store, draft_keys(p)) == [False] * first + [True] * (4 - first)


@pytest.mark.parametrize("at_p", [True, False])
def test_d_follows_a_p_with_and_without_drafts(half, at_p):
    p, d = half(drafts=at_p, layer_ranges=3), half(POISON, layer_ranges=3)
    handoff, keys = HandoffId(new_id()), p.cache.keys(TOKENS)
    job = d.pool.load(d.cache.keys(TOKENS), THERE, follow=handoff)
    opened = p.pool.begin_save(SavePlan(keys, handoff=handoff), HERE)
    for num_layers in range(1, len(p.layout.held_layers) + 1):
        opened.layers_done(num_layers)
    assert opened.job.wait(20) == job.wait(20) == JobResult(230)
    check_model(p, d)
    check_draft(p, d, job.num_with_drafts)
    assert job.num_with_drafts == 0 or at_p


class TakesNoDrafts:
    """Makes a store refuse drafts with an error."""

    def __init__(self, store, monkeypatch, error):
        self.refused = 0
        put = store.put

        def chosen(keys, slots):
            if any(":1." in key for key in keys):
                self.refused += 1
                raise error
            return put(keys, slots)

        monkeypatch.setattr(store, "put", chosen)


@pytest.mark.parametrize("store", URLS[:1], indirect=True)
@pytest.mark.parametrize("error", [StoreFull("full"), StoreError("broken")])
def test_a_store_that_takes_no_drafts_fails_no_save(half, store, monkeypatch, error):
    p, d = half(), half(POISON)
    refusing = TakesNoDrafts(store, monkeypatch, error)
    handoff = handoff_of(p)
    assert save(p, handoff=handoff) == JobResult(230)
    assert refusing.refused
    assert store.match([handoff.done(p.namespace, 0)])
    assert load(d).result == JobResult(230)
    check_draft(p, d, 0)


def request_of(one, tokens, params=None):
    return EngineRequest(one.cache, one.settings, one.cache.keys(tokens), params)


def served(one, tokens, num_present=0):
    """Loads what a request finds, and returns the plan of the save of what it computes."""
    request = request_of(one, tokens)
    assert request.poll(10)
    end = request.find(num_present, len(tokens))
    if end > num_present:
        job = one.pool.begin_load(request.plan_load(end, len(tokens)), THERE)
        job.wait(20)
        request.ends.append(JobEnd.of_job(job))
        end = request.end_load()
    request.begin_step(end, len(tokens))
    return request.plan_save(end, len(tokens))


def computed(one, tokens, start):
    """Fills the rows of tokens that an engine computes, at all layers."""
    for cache in one.caches:
        blocks = cache[list(THERE)]
        blocks.flatten(0, 1)[start : len(tokens)] = 5.0
        cache[list(THERE)] = blocks


@pytest.mark.parametrize("at_p", [True, False], ids=["warm", "cold"])
def test_a_second_turn_saves_the_drafts_of_blocks_whose_rows_are_all_its_own(half, store, at_p):
    """P saved whole blocks and a tail; the next turn ends the tail's block, and adds two."""
    p, d = half(drafts=at_p), half(POISON, role="both")
    save(p, handoff=handoff_of(p))
    longer = range(350)
    # the prompt's tail is no part of the longer prompt: its last block is computed anew
    plan = served(d, longer)
    assert plan.drafts_from == (0 if at_p else 192)
    computed(d, longer, 192)
    opened = d.pool.begin_save(plan, THERE)
    opened.layers_done(4)
    assert opened.job.wait(20).reason is None
    assert stored(store, draft_keys(d, longer))[:5] == [at_p] * 3 + [True] * 2


def test_rows_that_the_engine_had_are_not_saved_as_drafts(half):
    """An engine's own prefix cache may have blocks that were loaded without drafts."""
    d = half(role="both")
    assert served(d, TOKENS, num_present=128).drafts_from == 128
    assert served(d, range(1000, 1230)).drafts_from == 0


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((DRAFT, FULL), "not optional"),
        ((FULL, DRAFT, FULL), "come after all others"),
        ((DRAFT,), "not optional"),
    ],
)
def test_drafts_are_the_last_layers(half, layers, words):
    with pytest.raises(LayoutError, match=words):
        half(layers=layers)


def test_the_self_test_covers_drafts(half):
    one = half()
    tried = self_test(one.settings, one.layout, one.caches, store=one.store)
    assert tried.num_bytes == BLOCK * 4 * 2 * 16 * 4


@pytest.mark.parametrize("store", URLS[:1], indirect=True)
@pytest.mark.parametrize("call", ["match", "get"])
def test_a_store_that_hangs_for_a_draft_ends_the_load_at_its_deadline(
    half, store, monkeypatch, call
):
    """The model's last copy is not left under way, which would put off the end of the job."""
    p, d = half(), half(POISON, deadline_s=0.5)
    save(p)
    found = d.cache.match(d.cache.keys(TOKENS))
    returns, really = Event(), getattr(store, call)

    def hangs(keys, *more):
        if any(":1." in key for key in keys):
            returns.wait(60)
        return really(keys, *more)

    monkeypatch.setattr(store, call, hangs)
    try:
        result = d.pool.load(found.keys, THERE).wait(30)
    finally:
        returns.set()
    assert (result.num_tokens, result.reason) == (NUM_TOKENS, Reason.DEADLINE)


@pytest.mark.parametrize("start", [0, BLOCK])
def test_a_draft_of_several_layers_is_saved_whole_or_not_at_all(half, store, start):
    """Its second layer's rows depend on all earlier rows of the first one."""
    p = half(layers=(*DRAFTING, DRAFT))
    assert save(p, handoff=handoff_of(p), drafts_from=start) == JobResult(230)
    assert stored(store, draft_keys(p)) == [start == 0] * 4


def test_rows_of_a_step_that_runs_no_draft_model_are_not_saved_as_drafts(half):
    """What begins before such a step's end is left out; earlier saves had the blocks before it."""
    d = half(role="both")
    request = request_of(d, TOKENS)
    assert request.poll(10)
    assert request.find(0, NUM_TOKENS) == 0
    plans = []
    for start, stop, runs_draft in ((0, 100, True), (100, 150, False), (150, 230, True)):
        request.begin_step(start, stop, runs_draft=runs_draft)
        plans.append(request.plan_save(start, stop))
    assert [plan.drafts_from for plan in plans if plan] == [0, 150, 150]
