"""KVPool when a store fails or hangs, and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections import Counter, deque

import pytest

from pdstore import KVPool, Layout, SavePlan
from pdstore.errors import ConfigError, PoolClosed, Reason, StoreUnavailable
from pdstore.format.plan import Announcement
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import start_background
from tests.support.kv import LAYERS, POISON, caches_of, eventually, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save


def test_a_hanging_store_ends_jobs_in_time_and_keeps_slots_until_it_returns(store, instance):
    faulty = Faulty(store)
    p = instance()
    save(p, range(200))
    d = instance(fill=POISON, over=faulty, deadline_s=1.0)
    keys = d.cache.keys(range(200))
    faulty.hold()
    job = d.pool.load(keys, D_BLOCKS)
    assert job.wait(5).reason is Reason.DEADLINE
    lent = d.pool.metrics.registry.get_sample_value
    assert lent("pdstore_slots_lent") > 0
    for cache in d.caches:  # the engine gives the blocks to somebody else
        cache.fill_(1.0)
    faulty.release()
    eventually(lambda: lent("pdstore_slots_lent") == 0)
    assert all((cache == 1.0).all() for cache in d.caches)
    assert d.pool.load(keys, D_BLOCKS).wait(5).num_tokens == 200


def held_by_pdstore() -> Counter[str]:
    """Counts pdstore's live objects by type, and what their containers hold; but for the store."""
    gc.collect()
    counts: Counter[str] = Counter()
    for each in gc.get_objects():
        kind, module = type(each), str(type(each).__module__)
        if module.startswith("pdstore.") and not module.startswith("pdstore.store"):
            counts[kind.__qualname__] += 1
            for name, value in getattr(each, "__dict__", {}).items():
                if isinstance(value, (dict, list, set, deque)):
                    counts[f"{kind.__qualname__}.{name}"] += len(value)
    return counts


@pytest.mark.requirement("R-X-5", "nothing grows with clients or time")
def test_nothing_grows_with_requests(instance):
    """Serves also requests that are aborted, miss, or name a hand-off that nobody saves."""
    p, d = instance(handoff_wait_s=0.01), instance(fill=POISON, handoff_wait_s=0.01)

    def serve(numbers):
        for n in numbers:
            tokens = [n, *range(100)]
            handoff, params = p.cache.announce(p.cache.keys(tokens))
            keys = d.cache.keys(tokens)
            announce = Announcement(handoff, len(tokens))
            save = p.pool.begin_save(SavePlan(keys, handoff=handoff, announce=announce), range(7))
            save.layers_done(len(p.layout.held_layers))
            saved = save.job
            loaded = d.pool.load(keys, D_BLOCKS, follow=handoff)
            (saved if n % 3 else loaded).cancel()
            unknown = {"pdstore": {"attempt": f"{n:032x}"}}
            lookups = [d.cache.lookup(keys, each) for each in (params, unknown, None)]
            for each in (saved, loaded, *lookups):
                each.wait(10)
        for pool in (p.pool, d.pool):
            eventually(lambda pool=pool: pool.num_jobs == 0)

    def grown():
        now = held_by_pdstore()
        return {name: n - before[name] for name, n in now.items() if n - before[name] >= 20}

    serve(range(70))  # until what is bounded is full
    before = held_by_pdstore()
    serve(range(70, 150))
    with contextlib.suppress(AssertionError):  # a heartbeat forgets what has ended at its next turn
        eventually(lambda: not grown())
    assert not grown()


@pytest.mark.requirement("C13", "engine blocks are given back whatever happens")
@pytest.mark.parametrize("seed", range(12))
def test_under_random_faults_d_has_a_right_prefix_and_nothing_leaks(store, instance, seed):
    faulty = Faulty(store, seed=seed, error_rate=0.05, miss_rate=0.05, corrupt_rate=0.05)
    p, d = instance(over=faulty), instance(fill=POISON, over=faulty)
    num_loaded = 0
    for length in (5, 64, 100, 200, 320, 317):
        tokens = [seed, length, *range(length - 2)]
        save(p, tokens)
        for cache in d.caches:
            cache.fill_(POISON)
        found = d.cache.match(d.cache.keys(tokens))
        result = d.pool.load(found.keys, D_BLOCKS).wait(10)
        assert result.num_tokens <= length
        assert_loaded(p, d, result.num_tokens)
        num_loaded += result.num_tokens
    assert num_loaded > 0
    for one in (p, d):
        eventually(lambda pool=one.pool: pool.num_jobs == 0)
        assert one.pool.metrics.registry.get_sample_value("pdstore_slots_lent") == 0


@pytest.mark.requirement("R-X-1, 6", "settings that cannot be used fail the start")
def test_too_little_staging_is_refused_at_the_start(store, instance):
    with pytest.raises(ConfigError, match="PDSTORE_STAGING"):
        instance(staging="64KiB")


@pytest.mark.parametrize("required", [True, False])
def test_a_store_that_is_down_refuses_only_when_it_is_required(required, caplog, closed_after):
    settings = settings_of(store="redis+unix:///nowhere/redis.sock", require_store=required)
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope="")
    namespace = layout.namespace(settings, weights="w")
    if required:
        with pytest.raises(StoreUnavailable, match=r"redis\.sock"):
            KVPool(settings, layout, caches_of(layout), namespace)
        return
    closed_after(KVPool(settings, layout, caches_of(layout), namespace))
    assert "serving without the pool" in caplog.text


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_whatever_a_store_raises_ends_its_job_alone(store, instance, kind):
    """Libraries raise such things on any thread; once they ended a worker for good."""

    class Odd(WrapperStore):
        is_odd = False

        def get(self, keys, slots):
            if self.is_odd:
                raise kind
            return super().get(keys, slots)

    odd = Odd(store)
    p, d = instance(), instance(fill=POISON, over=odd, workers=2)
    save(p, range(200))
    odd.is_odd = True
    for _ in range(3):
        result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
        assert (result.num_tokens, result.reason) == (0, Reason.FAULT)
    odd.is_odd = False
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)


class Held(WrapperStore):
    """Holds puts of blocks until it is opened."""

    def __init__(self, store):
        super().__init__(store)
        self.opened, self.num_inside = threading.Event(), 0

    def put(self, keys, slots):
        if ":handoff:" not in keys[0]:
            self.num_inside += 1
            self.opened.wait(30)
        return super().put(keys, slots)


def test_close_ends_everything(instance):
    before = set(threading.enumerate())
    one = instance()
    jobs = [one.pool.save(one.cache.keys([i, *range(99)]), P_BLOCKS) for i in range(20)]
    one.close()
    one.close()
    assert all(job.done for job in jobs)
    assert set(threading.enumerate()) <= before
    assert one.pool.save(one.cache.keys(range(10)), P_BLOCKS).result.reason is Reason.CLOSED


def test_a_handoff_that_the_close_cuts_is_marked_as_failed(instance, store):
    held = Held(store)
    p, d = instance(over=held, drain_s=0.05), instance(fill=POISON, handoff_wait_s=30.0)
    keys = p.cache.keys(range(100))
    attempt, params = p.cache.announce(keys)
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    job = p.pool.save(keys, P_BLOCKS, handoff=attempt)
    eventually(lambda: held.num_inside)
    p.pool.close()
    assert job.result.reason is Reason.CLOSED
    assert lookup.wait(5).reason is Reason.HANDOFF_FAILED
    held.opened.set()


class Hung(WrapperStore):
    """Never answers a call once it hangs, until the test's end."""

    def __init__(self, store):
        super().__init__(store)
        self.hangs, self.ended = False, threading.Event()

    def match(self, keys):
        if self.hangs:
            self.ended.wait(60)
        return super().match(keys)

    def put(self, keys, slots):
        self.match(keys)
        return super().put(keys, slots)


def test_close_ends_in_time_though_no_call_of_the_store_does(instance, store):
    hung = Hung(store)
    one = instance(over=hung, drain_s=0.2)
    hung.hangs = True
    keys = one.cache.keys(range(200))
    handoff, params = one.cache.announce(keys)
    for lookup in (one.cache.lookup(keys), one.cache.lookup(keys, params)):
        assert lookup.poll() is None
    jobs = [one.pool.save(keys, P_BLOCKS, handoff=handoff) for _ in range(3)]
    jobs += [one.pool.load(keys, D_BLOCKS, follow=handoff)]
    try:
        for each in (one.pool, one.cache):
            begin = time.monotonic()
            each.close()
            assert time.monotonic() - begin < 0.2 + 2, each
        assert all(job.done for job in jobs)
    finally:
        hung.ended.set()


def in_child(function) -> bool:
    """True if `function` comes to its end in the child of a fork, in time."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)  # ends a child that hangs
        function()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_may_call_everything_while_the_parents_jobs_run(instance, store):
    """The parent's threads held locks at the fork, which nobody gives back in the child."""
    p = instance(over=store, workers=4)
    keys = p.cache.keys(range(64))
    running, stop = [p.pool.save(keys, P_BLOCKS)], threading.Event()

    def work():
        while not stop.is_set():
            for job in [p.pool.load(keys, D_BLOCKS) for _ in range(8)]:
                job.wait(10)

    def call_everything():
        running[0].cancel()
        assert p.pool.load(keys, D_BLOCKS).result.reason is Reason.CLOSED
        assert p.pool.save(keys, P_BLOCKS).result.reason is Reason.CLOSED
        with pytest.raises(PoolClosed):
            p.pool.flush(1.0)
        p.pool.close()

    join = start_background(work, work)
    try:
        assert all(in_child(call_everything) for _ in range(30))
    finally:
        stop.set()
        join(20)
