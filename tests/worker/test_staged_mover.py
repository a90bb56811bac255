"""StagedMover: windows of slots, two at most, and the checksums of stores that sum."""

from __future__ import annotations

import threading

import pytest

from pdstore.store.wrappers import WrapperStore
from pdstore.worker.swap.torch import TorchSwap
from tests.support.kv import BLOCK_BYTES, POISON
from tests.support.pool_kit import P_BLOCKS, assert_loaded, load, save


class Watched(WrapperStore):
    """Notes how many slots are lent at each get, and how many keys it has."""

    def __init__(self, store):
        super().__init__(store)
        self.pool, self.lent, self.windows = None, [], []

    def get(self, keys, slots):
        if ":0:0:" in keys[0]:
            self.lent.append(slots_lent(self.pool))
            self.windows.append(len(keys))
        return super().get(keys, slots)


def slots_lent(pool) -> float:
    return pool.metrics.registry.get_sample_value("pdstore_slots_lent")


def test_a_child_job_holds_two_windows_at_most_and_gives_all_back(instance, store):
    watched = Watched(store)
    p = instance()
    d = instance(fill=POISON, over=watched, workers=2, range_bytes=2 * BLOCK_BYTES)
    watched.pool = d.pool
    save(p, range(320))
    assert load(d, range(320)).num_tokens == 320
    assert sum(watched.windows) == 5
    assert max(watched.windows) <= 2
    assert max(watched.lent) <= 4
    assert slots_lent(d.pool) == 0
    assert_loaded(p, d, 320)


def test_windows_pass_through_little_staging_beside_each_other(instance):
    """16 slots, of which a quarter is kept for the other direction."""
    p, d = (
        instance(fill=f, staging=f"{16 * 28}KiB", workers=6, range_bytes=4 * BLOCK_BYTES)
        for f in (None, POISON)
    )
    jobs = [p.pool.save(p.cache.keys([n, *range(319)]), P_BLOCKS) for n in range(6)]
    assert [job.wait(20).num_tokens for job in jobs] == [320] * 6
    jobs = [d.pool.load(d.cache.keys([n, *range(319)]), P_BLOCKS) for n in range(6)]
    assert [job.wait(20).num_tokens for job in jobs] == [320] * 6
    assert slots_lent(d.pool) == 0


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_next_window_is_read_while_the_last_one_copies(instance, store, num_workers):
    """The first copy goes on until a second get has begun."""
    second = threading.Event()

    class Gets(WrapperStore):
        num_gets = 0

        def get(self, keys, slots):
            if ":0:0:" in keys[0]:
                self.num_gets += 1
                if self.num_gets == 2:
                    second.set()
            return super().get(keys, slots)

    p = instance()
    save(p, range(256))

    class SlowSwap(TorchSwap):
        def start_scatter(self, copies, ready=None):
            wait = super().start_scatter(copies, ready)

            def finish():
                assert second.wait(10)
                wait()

            return finish

    changes = {"workers": num_workers, "range_bytes": BLOCK_BYTES, "swap": SlowSwap}
    d = instance(fill=POISON, over=Gets(store), **changes)
    assert load(d, range(256)).num_tokens == 256
    assert_loaded(p, d, 256)
