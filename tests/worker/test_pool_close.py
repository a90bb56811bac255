"""The end of a pool: close, and the child of a fork."""

from __future__ import annotations

import os
import signal
import threading
import time

from pdstore.outcome import Reason
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.threads import start_background
from tests.support.kv import POISON, eventually
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS


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


def test_a_second_close_waits_for_the_first_and_cuts_nothing(instance, store):
    held = Held(store)
    p = instance(over=held)
    job = p.pool.save(p.cache.keys(range(100)), P_BLOCKS)
    eventually(lambda: held.num_inside)
    ended: list = []

    def close():
        p.pool.close()
        ended.append(job.result)

    join = start_background(close, close)
    threading.Timer(0.1, held.opened.set).start()
    join(20)
    assert [result.reason for result in ended] == [None, None]


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
        p.pool.close()

    join = start_background(work, work)
    try:
        assert all(in_child(call_everything) for _ in range(30))
    finally:
        stop.set()
        join(20)
