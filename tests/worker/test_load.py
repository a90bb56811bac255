"""Loads: a load in ranges over several workers brings what one worker would bring."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from pdstore import Reason
from pdstore.errors import SwapError
from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import Kind, kind_of
from pdstore.store import open_store
from pdstore.store.transfer import RANGE_BYTES
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import get, put
from pdstore.worker.swap.base import TorchSwap
from tests.support.kv import BLOCK_BYTES, POISON, eventually, settings_of

P_BLOCKS, D_BLOCKS = list(range(1, 21)), list(range(30, 50))


@pytest.fixture
def d(instance):
    return instance(fill=POISON, workers=4, range_bytes=1)


def save(p, num_tokens):
    p.pool.save(p.cache.keys(range(num_tokens)), P_BLOCKS).wait(10)
    return p.cache.keys(range(num_tokens))


def test_the_tokens_before_the_first_gap_count_and_the_load_counts_once(p, d, store):
    keys = save(p, 320)
    names = keys.store_keys(keys.namespace.parts)
    store.remove([names[2], names[4]])
    result = d.pool.load(keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.LOST)
    assert torch.equal(d.tokens(D_BLOCKS)[:128], p.tokens(P_BLOCKS)[:128])
    jobs = d.pool.metrics.jobs
    counted = [s.value for s in jobs.collect()[0].samples if s.name.endswith("_total")]
    assert sum(counted) == 1.0


@pytest.fixture(params=["file", "shm", pytest.param("redis", marks=pytest.mark.redis)])
def real_store(request, tmp_path):
    """A store of another process or of files, so that each kind of mover is met."""
    urls = {"file": f"file://{tmp_path}/pool", "shm": f"shm://p?size=8MiB&dir={tmp_path}"}
    url = urls.get(request.param) or request.getfixturevalue("redis_url")
    with contextlib.closing(open_store(url, settings_of())) as store:
        yield store


def damage(store, key, num_bytes=None, payload_bytes=BLOCK_BYTES):
    """Puts a value in the place of another: its bytes turned, as many of them as are asked for."""
    (value,) = get(store, [key], [payload_bytes + HEADER_BYTES])
    store.remove([key])
    put(store, [key], [bytes([*value[:-1], value[-1] ^ 1])[:num_bytes]])


@pytest.mark.parametrize("range_bytes", [1, RANGE_BYTES])
def test_one_load_removes_all_that_is_wrong_and_one_save_heals(real_store, instance, range_bytes):
    own = {"over": real_store, "weights": f"of {range_bytes}"}
    p = instance(**own)
    d = instance(fill=POISON, workers=4, range_bytes=range_bytes, **own)
    keys = save(p, 320)
    names = keys.store_keys(keys.namespace.parts)
    for number, num_bytes in [(1, None), (2, -1), (4, None)]:
        damage(real_store, names[number], num_bytes)
    real_store.remove([names[3]])
    result = d.pool.load(keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.CORRUPT)
    assert (d.tokens(D_BLOCKS)[64:] == POISON).all() or range_bytes == 1
    assert [real_store.match([name]) for name in names] == [1, 0, 0, 0, 0]
    save(p, 320)
    assert d.pool.load(keys, D_BLOCKS).wait(10).num_tokens == 320
    assert torch.equal(d.tokens(D_BLOCKS)[:320], p.tokens(P_BLOCKS)[:320])


class Gate(WrapperStore):
    """Holds each `get` of blocks until it is opened."""

    def __init__(self, inner):
        super().__init__(inner)
        self.opened, self.num_gets = threading.Event(), 0

    def get(self, keys, slots):
        if kind_of(keys[0]) is not Kind.POOL:
            self.num_gets += 1
            self.opened.wait(30)
        return super().get(keys, slots)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_ranges_run_side_by_side_and_a_cancelled_load_writes_nothing_after_its_end(
    p, instance, store, is_cancelled
):
    keys, gate = save(p, 320), Gate(store)
    d = instance(fill=POISON, over=gate, range_bytes=1, workers=4)
    job = d.pool.load(keys, D_BLOCKS)
    eventually(lambda: gate.num_gets == 3)
    assert not job.done
    if is_cancelled:
        job.cancel()
        assert job.wait(10).reason is Reason.CANCELLED
    gate.opened.set()
    assert job.wait(10).num_tokens == (0 if is_cancelled else 320)
    d.pool.close()
    assert not is_cancelled or all((cache == POISON).all() for cache in d.caches)


def test_nothing_counts_behind_a_copy_that_failed(instance):
    """The last range, blocks 14 to 16, is two copies: the first fails when the second has begun."""

    class Failing(TorchSwap):
        num_copies = 0

        def start_scatter(self, copies, ready=None):
            self.num_copies += 1
            wait, number = super().start_scatter(copies, ready), self.num_copies

            def finish():
                wait()
                if number == 8:
                    raise SwapError("injected")

            return finish

    more = {"num_blocks": 80, "workers": 2, "range_bytes": 2 * BLOCK_BYTES}
    p, d = instance(**more), instance(fill=POISON, swap=Failing, **more)
    keys, blocks = p.cache.keys(range(17 * 64)), list(range(68))
    assert p.pool.save(keys, blocks).wait(10).reason is None
    result = d.pool.load(keys, blocks).wait(10)
    assert (result.num_tokens, result.reason) == (14 * 64, Reason.FAULT)
