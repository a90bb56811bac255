"""Jobs over a store and copies that go wrong: what a job says is there is there, and is right."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from pdstore import HandoffId, LayerSpec, Store
from pdstore.errors import JobResult, Reason, StoreFull, StoreUnavailable, SwapError
from pdstore.format.continuation import NO_BLOCK, BlockTables
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.plan import SavePlan
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore
from pdstore.store.transfer import RANGE_BYTES
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.job import Job
from pdstore.worker.swap.base import ReadyEvent, TorchSwap
from tests.support.kv import BLOCK_BYTES, LAYERS, POISON, Instance, eventually

BLOCKS = list(range(80))
SMALL = LayerSpec.state(40, "small", table=1, is_whole=True)
LARGE = LayerSpec.state(3_000, "large", table=2, is_whole=True)
WINDOW = LayerSpec(2, 8, window=100, table=3)
PAGE = LayerSpec.page(900, 16, "rows, scales")
DRAFT = LayerSpec(2, 8, optional=True)
APART = LayerSpec.page(1_500, 64, "rows, scales", table=1)
LAYOUTS = {
    "no states": LAYERS,
    "pages": (*LAYERS, PAGE),
    "pages in a table of their own": (APART, *LAYERS),
    "one group of states": (*LAYERS, SMALL),
    "two groups of states": (SMALL, *LAYERS, LARGE),
    "states beside windows": (LAYERS[0], SMALL, WINDOW, LARGE, WINDOW),
    "drafts": (*LAYERS, DRAFT),
    "drafts beside states and windows": (LAYERS[0], SMALL, WINDOW, DRAFT, DRAFT),
}
seeds = pytest.mark.parametrize(
    "seeds",
    [
        range(50, 80),  # with some that have found something
        pytest.param(range(3_000), marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
    ],
    ids=["few", "many"],
)


class Plan(NamedTuple):
    """A prompt, an instance that moves it, and how often its store and its copies fail."""

    seed: int
    num_tokens: int
    first_token: int
    layer_ranges: int
    kv_shards: int
    workers: int
    range_bytes: int
    staging: str
    badness: float
    bad_copies: bool
    way: str
    layers: str

    @property
    def shape(self) -> dict[str, object]:
        """The arguments of `Instance` that P and D have in common."""
        layers = LAYOUTS[self.layers]
        return {
            "layers": layers,
            "draft": "one" if DRAFT in layers else "",
            "engine_block_tokens": (16, 64) if APART in layers else 16,
            "layer_ranges": self.layer_ranges,
            "kv_shards": self.kv_shards,
            "num_blocks": len(BLOCKS),
            "boundary_tokens": 16 if WINDOW in layers else None,
        }

    @property
    def manner(self) -> dict[str, object]:
        """The arguments of the instance under test alone."""
        return {
            "workers": self.workers,
            "range_bytes": self.range_bytes,
            "staging": self.staging,
            "handoff_wait_s": 5.0,
        }


def plan_of(seed: int, *ways: str) -> Plan:
    draw = random.Random(seed)
    return Plan(
        seed=seed,
        num_tokens=draw.randint(1, 18 * 64),
        first_token=draw.choice([0, 0, 16, 64, 80]),
        layer_ranges=draw.choice([1, 3]),
        kv_shards=draw.choice([1, 2]),
        workers=draw.choice([2, 3, 6]),
        range_bytes=draw.choice([1, BLOCK_BYTES, 2 * BLOCK_BYTES, RANGE_BYTES]),
        staging=draw.choice(["8MiB", "560KiB"]),
        badness=draw.choice([0.05, 0.2, 0.6]),
        bad_copies=draw.random() < 0.5,
        way=draw.choice(ways),
        layers=draw.choice([*LAYOUTS]),
    )


def saved_tables(p: Instance, num_tokens: int, seed: int) -> BlockTables:
    """Returns P's block tables, with states after some of its blocks and after the last token."""
    draw = random.Random(seed)
    size = p.layout.block_tokens
    ends = {end for end in range(size, num_tokens, size) if draw.random() < 0.3} | {num_tokens}
    tables: list[Sequence[int] | dict[int, int]] = []
    for tokens in p.layout.geometry.tables:
        entries = draw.sample(BLOCKS, len(ends))
        tables.append(BLOCKS if tokens else dict(zip(sorted(ends), entries, strict=True)))
    return tables


def loaded_tables(d: Instance, num_tokens: int) -> BlockTables:
    """Returns D's block tables: of states the last, of windows what is needed after the tokens."""
    tables: list[Sequence[int] | dict[int, int]] = []
    for number, tokens in enumerate(d.layout.geometry.tables):
        if tokens is None:
            tables.append({num_tokens: number} if num_tokens else {})
            continue
        needed = d.layout.continuation.blocks(number, num_tokens)
        first = needed.start * (d.layout.block_tokens // tokens)
        tables.append([NO_BLOCK] * first + BLOCKS[first:])
    return tables


class BadStore(WrapperStore):
    """Fails, falls short, damages and forgets, from `goes_bad` on."""

    def __init__(self, store: Store, plan: Plan) -> None:
        super().__init__(store)
        self._draw, self._badness = random.Random(plan.seed), 0.0
        self._plan, self._put = plan, list[BlockKey]()

    def goes_bad(self) -> None:
        self._badness = self._plan.badness

    def match(self, keys: Sequence[BlockKey]) -> int:
        if self._draw.random() < self._badness / 8:
            raise StoreUnavailable("injected")
        return super().match(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        got = super().get(keys, slots)
        if self._draw.random() >= self._badness:
            return got
        fault = self._draw.choice(["damage", "short", "lost", "error", "odd"])
        if fault == "damage" and got:
            value = slots.value(self._draw.randrange(got))
            value[self._draw.randrange(len(value))] ^= 1
        elif fault == "error":
            raise StoreUnavailable("injected", num_done=self._draw.randint(0, got))
        return {"short": self._draw.randint(0, got), "lost": 0, "odd": got + 5}.get(fault, got)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        if self._draw.random() >= self._badness:
            self._put += keys
            return super().put(keys, slots)
        fault = self._draw.choice(["error", "full", "fewer", "none", "dropped", "forgets"])
        if fault in ("error", "full"):
            raise {"error": StoreUnavailable, "full": StoreFull}[fault]("injected")
        if fault == "forgets" and self._put:
            super().remove([self._draw.choice(self._put)])
        if fault in ("none", "dropped"):
            return 0 if fault == "none" else len(keys)
        taken = self._draw.randint(0, len(keys)) if fault == "fewer" else len(keys)
        return super().put(keys[:taken], slots.part(0, taken)) if taken else 0


class BadSwap(TorchSwap):
    """Copies late, and fails now and then before or after it has begun."""

    planned: Plan

    def start_scatter(self, copies, ready: ReadyEvent | None = None):
        draw = random.Random(f"{self.planned.seed} {len(copies)} {copies[0].block_ids[0]}")
        if draw.random() < 0.02:
            raise SwapError("injected")
        if draw.random() < 0.05:
            return fails
        kept = list(copies)
        return lambda: self.scatter(kept, ready)


def fails() -> None:
    raise SwapError("injected")


def bad_swap_of(plan: Plan):
    return type("PlannedSwap", (BadSwap,), {"planned": plan}) if plan.bad_copies else None


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Logs nothing: each fault would have its lines."""
    caplog.set_level(logging.CRITICAL)


@seeds
def test_what_a_load_says_is_loaded_is_what_was_saved(seeds: range) -> None:
    for seed in seeds:
        plan = plan_of(seed, "plain", "follow")
        store = BadStore(MemoryStore(), plan)
        p = Instance(store, **plan.shape)
        d = Instance(store, fill=POISON, swap=bad_swap_of(plan), **plan.shape, **plan.manner)
        keys, saved = p.cache.keys(range(plan.num_tokens)), saved_tables(p, plan.num_tokens, seed)
        assert p.pool.save(keys, saved).wait(20).reason is None
        store.goes_bad()
        step = d.layout.geometry.common_tokens
        first = min(plan.first_token, plan.num_tokens) // step * step
        handoff = HandoffId("1" * 32) if plan.way == "follow" else None
        tables = loaded_tables(d, plan.num_tokens)
        job = d.pool.load(keys, tables, first_token=first, follow=handoff)
        if handoff is not None:
            p.pool.abort_handoff(handoff)
        result = job.wait(20)
        assert_right(p, d, saved, tables, job, first)
        assert all((kv.rows[: first // kv.tokens] == POISON).all() for kv in rows_of(d).values())
        assert result.reason is not None or result.num_tokens == plan.num_tokens
        assert result.reason is not Reason.DEADLINE
        close(p, d)


@seeds
def test_what_a_save_leaves_in_the_pool_is_right_and_its_handoff_whole(seeds: range) -> None:
    for seed in seeds:
        plan = plan_of(seed, "whole", "by layer")
        good = MemoryStore()
        store = BadStore(good, plan)
        p = Instance(store, **plan.shape, **plan.manner)
        d = Instance(good, fill=POISON, **plan.shape)
        keys, handoff = p.cache.keys(range(plan.num_tokens)), HandoffId("2" * 32)
        tables = saved_tables(p, plan.num_tokens, seed)
        store.goes_bad()
        result = saved(p, keys, tables, handoff, plan.way)
        done = [handoff.done(p.namespace, n) for n in range(p.namespace.num_shards)]
        if result.reason is None:
            assert good.match(done) == len(done)
        found = d.cache.match(d.cache.keys(range(plan.num_tokens + 1)))
        places = loaded_tables(d, found.num_tokens)
        loaded = d.pool.load(found.keys, places)
        assert loaded.wait(20).num_tokens == found.num_tokens
        assert_right(p, d, tables, places, loaded)
        close(p, d)


def saved(
    p: Instance, keys: PromptKeys, tables: BlockTables, handoff: HandoffId, way: str
) -> JobResult:
    """Saves a prompt for a hand-off; by layer, each layer is written just before it is released."""
    if way == "whole":
        return p.pool.save(keys, tables, handoff=handoff).wait(20)
    want = [cache.clone() for cache in p.caches]
    for cache in p.caches:
        cache.fill_(POISON)
    save = p.pool.begin_save(SavePlan(keys, handoff=handoff), tables)
    for layer, cache in enumerate(p.caches):
        cache.copy_(want[layer])
        save.layers_done(layer + 1)
        time.sleep(0.003)  # the forward; meanwhile the save may fall short
    return save.job.wait(20)


class Rows(NamedTuple):
    """The tokens or pages of a layer, in the order of the prompt; tokens: of one of them."""

    rows: torch.Tensor
    tokens: int

    def of(self, first: int, stop: int) -> torch.Tensor:
        """Returns the rows that have tokens in [first, stop)."""
        return self.rows[first // self.tokens : -(-stop // self.tokens) if first < stop else 0]


def rows_of(one: Instance) -> dict[int, Rows]:
    """Returns the rows of each layer that has any, by the layer's number."""
    layers = one.layout.identity.layers
    return {
        n: Rows(one.tokens(BLOCKS, n), spec.cell_tokens)
        for n, spec in enumerate(layers)
        if spec.cell_tokens is not None
    }


def assert_right(
    p: Instance, d: Instance, saved: BlockTables, loaded: BlockTables, job: Job, first: int = 0
) -> None:
    """D has P's KV of the loaded tokens in every layer, as far as it is needed, and P's states.

    Of a page that has such a token, it has all. Of drafts it has what the job says.

    first: the token at which the load began.
    """
    got, want = rows_of(d), rows_of(p)
    assert job.result is not None
    end = job.result.num_tokens
    for layer, spec in enumerate(p.layout.identity.layers):
        if not spec.is_state:
            block = d.layout.continuation.blocks(spec.table, end).start
            begin = max(first, block * d.layout.block_tokens)
            stop = job.num_with_drafts if spec.optional else end
            needed = (each[layer].of(begin, stop) for each in (got, want))
            assert torch.equal(*needed)
        elif end > first:
            at_d, at_p = (tables[spec.table][end] for tables in (loaded, saved))
            assert torch.equal(d.caches[layer][at_d], p.caches[layer][at_p])


def close(p: Instance, d: Instance) -> None:
    """Ends both; nothing of theirs is still lent."""
    eventually(lambda: p.pool.num_jobs == d.pool.num_jobs == 0, 20)
    for each in (p, d):
        each.close()
        assert not each.pool.metrics.registry.get_sample_value("pdstore_slots_lent")
