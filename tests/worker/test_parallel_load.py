"""Loads in ranges over several workers: the result is that of one load."""

from __future__ import annotations

import threading

import pytest
import torch

from pdstore import Reason, open_store
from pdstore.format.keys import Kind, kind_of
from pdstore.outcome import Direction
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.job import Job
from pdstore.worker.parallel_load import ranges_of
from tests.support.kv import POISON, Instance, eventually, settings_of

P_BLOCKS, D_BLOCKS = list(range(1, 21)), list(range(30, 50))


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr("pdstore.worker.parallel_load.RANGE_BYTES", 1)


@pytest.fixture
def store():
    store = open_store("memory://", settings_of())
    yield store
    store.close()


@pytest.fixture
def p(store):
    p = Instance(store)
    yield p
    p.close()


@pytest.fixture
def d(store):
    d = Instance(store, fill=POISON, workers=4)
    yield d
    d.close()


def save(p, num_tokens):
    p.pool.save(p.cache.keys(range(num_tokens)), P_BLOCKS).wait(10)
    return p.cache.keys(range(num_tokens))


def test_stripes_are_even_and_in_order():
    assert ranges_of(2, 12, 3) == [(2, 5), (5, 8), (8, 12)]
    assert ranges_of(0, 2, 10) == [(0, 1), (1, 2)]
    assert ranges_of(4, 4, 0) == [(4, 4)]


def test_a_small_load_is_one_stripe(monkeypatch):
    monkeypatch.setattr("pdstore.worker.parallel_load.RANGE_BYTES", 100)
    assert ranges_of(0, 10, 199) == [(0, 10)]
    assert len(ranges_of(0, 10, 200)) == 2


@pytest.mark.parametrize("first_token", [0, 48, 64, 144])
@pytest.mark.parametrize("num_tokens", [150, 192, 320])
def test_a_striped_load_brings_what_one_job_brings(p, d, num_tokens, first_token):
    keys = save(p, num_tokens)
    job = d.pool.load(keys, D_BLOCKS, first_token=first_token)
    assert job.wait(10).num_tokens == num_tokens
    got, want = d.tokens(D_BLOCKS), p.tokens(P_BLOCKS)
    assert torch.equal(got[first_token:num_tokens], want[first_token:num_tokens])
    assert (got[:first_token] == POISON).all()
    assert (got[num_tokens:] == POISON).all()


def test_the_tokens_before_the_first_gap_count_and_the_load_counts_once(p, d, store):
    keys = save(p, 320)
    names = keys.store_keys(keys.namespace.parts)
    store.remove([names[2], names[4]])
    result = d.pool.load(keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.LOST)
    assert torch.equal(d.tokens(D_BLOCKS)[:128], p.tokens(P_BLOCKS)[:128])
    jobs = d.pool.metrics.jobs
    counted = [s.value for s in jobs.collect()[0].samples if s.name.endswith("_total")]
    assert counted == [1.0]


class Gate(WrapperStore):
    """Holds each `get` of blocks until it is opened."""

    def __init__(self, inner):
        super().__init__(inner)
        self.opened, self.num_waiting = threading.Event(), 0

    def get(self, keys, slots):
        if kind_of(keys[0]) is not Kind.POOL:
            self.num_waiting += 1
            self.opened.wait(30)
        return super().get(keys, slots)


def test_stripes_run_side_by_side_and_the_load_ends_with_the_last_of_them(p, store):
    keys, gate = save(p, 320), Gate(store)
    d = Instance(gate, fill=POISON, workers=4)
    job = d.pool.load(keys, D_BLOCKS)
    eventually(lambda: gate.num_waiting == 3)
    assert not job.done
    gate.opened.set()
    assert job.wait(10).num_tokens == 320
    assert d.pool.num_jobs == 0
    d.close()


def test_a_cancelled_load_writes_nothing_after_its_end(p, store):
    keys, gate = save(p, 320), Gate(store)
    d = Instance(gate, fill=POISON, workers=4)
    job = d.pool.load(keys, D_BLOCKS)
    eventually(lambda: gate.num_waiting == 3)
    job.cancel()
    assert job.wait(10).reason is Reason.CANCELLED
    gate.opened.set()
    d.close()
    assert all((cache == POISON).all() for cache in d.caches)


def test_who_finds_no_worker_is_not_waited_for(p, store):
    """One worker is kept for loads; the others are in a store that hangs."""
    keys, gate = save(p, 320), Gate(store)
    d = Instance(gate, fill=POISON, workers=4)
    held = threading.Event()
    for _ in range(3):
        d.pool._transfer.submit(
            Job(Direction.SAVE, lambda job: held.wait(30) and None, num_bytes=0, seconds=30)
        )
    gate.opened.set()
    job = d.pool.load(keys, D_BLOCKS)
    assert job.wait(10).num_tokens == 320
    eventually(lambda: d.pool.num_jobs == 3)
    held.set()
    d.close()
    assert torch.equal(d.tokens(D_BLOCKS), p.tokens(P_BLOCKS))


def test_a_stripe_that_takes_long_holds_up_no_other(p, store):
    keys = save(p, 320)
    first = keys.store_keys(keys.namespace.parts)[0]
    gate = FirstHeld(store, first)
    d = Instance(gate, fill=POISON, workers=3)
    job = d.pool.load(keys, D_BLOCKS)
    eventually(lambda: gate.num_got == 4)
    assert not job.done
    gate.opened.set()
    assert job.wait(10).num_tokens == 320
    d.close()


def test_behind_a_gap_no_stripe_is_begun(p, store):
    keys = save(p, 320)
    names = keys.store_keys(keys.namespace.parts)
    store.remove(names[:1])
    gate = FirstHeld(store, names[4])
    gate.opened.set()
    d = Instance(gate, fill=POISON, workers=2)  # one of them is for saves alone
    result = d.pool.load(keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.LOST)
    assert gate.num_got == 1
    d.close()


class FirstHeld(WrapperStore):
    """Holds the `get` that begins with one key; counts the others."""

    def __init__(self, inner, key):
        super().__init__(inner)
        self.opened, self.num_got, self._key = threading.Event(), 0, key

    def get(self, keys, slots):
        if kind_of(keys[0]) is Kind.POOL:
            return super().get(keys, slots)
        if keys[0] == self._key:
            self.opened.wait(30)
        self.num_got += 1
        return super().get(keys, slots)
