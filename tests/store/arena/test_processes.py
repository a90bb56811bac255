"""Several processes on one arena, killed or stopped anywhere: nothing hangs, leaks or is wrong."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdstore import KVPool, Layout, PrefixCacheManager
from pdstore.errors import StoreFull, StoreTimeout
from tests.store.arena import actors
from tests.support.kv import LAYERS, caches_of, eventually, settings_of

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 100.0


@contextlib.contextmanager
def actor(*arguments: object):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.arena.actors", *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children, too
        process.wait(DEADLINE_S)
        process.stdout.close()


def all_slots_come_back(store) -> bool:
    """True if the whole arena can be reserved again, in slots of a size that nobody used."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        store.clear(actors.NAMESPACE)
        keys = [f"all{i}" for i in range(8)]
        with contextlib.suppress(StoreFull):  # not even one has come back
            reservation = store.reserve(keys, [store.span_bytes] * 8)
            store.abandon(reservation)
            if reservation.num_keys == 8:
                return True
        time.sleep(0.02)  # what the dead had reserved rests
    return False


@pytest.mark.parametrize("times", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_processes_killed_anywhere_leave_only_misses(tmp_path, times):
    order = random.Random(times)
    with (
        contextlib.closing(actors.open_store(tmp_path)) as store,
        actor("kill_writers", tmp_path, times, 1) as killer,
    ):
        end = time.monotonic() + DEADLINE_S
        while killer.poll() is None:
            assert time.monotonic() < end
            keys = order.sample(actors.KEYS, 6)
            actors.read(store, keys)
            actors.read_in_place(store, keys)
        assert (killer.stdout.read().strip(), killer.returncode) == ("done", 0)
        assert store.counts().reserved <= len(actors.KEYS)
        assert all_slots_come_back(store)
        actors.write(store, actors.KEYS[:20])
        assert store.match(actors.KEYS[:20]) == 20


@pytest.fixture
def stopped_holder(tmp_path):
    """A store with a reservation, and a process that was stopped while it held the lock."""
    with contextlib.ExitStack() as stack:
        store = actors.open_large(tmp_path, lock_timeout_s=0.2)
        stack.callback(store.close)
        reservation = store.reserve(["mine"], [64])
        holder = stack.enter_context(actor("count_for_ever", tmp_path))
        stop_with_the_lock(store, holder)
        yield store, holder, reservation


def stop_with_the_lock(store, holder) -> None:
    """Stops a process while it holds the lock of this store's arena."""
    for _ in range(100):
        seen = store.wait_for_change(None, 0)
        assert store.wait_for_change(seen, 30) != seen, "it goes on"
        time.sleep(random.uniform(0, 0.005))  # to stop it anywhere, and not where it woke us
        holder.send_signal(signal.SIGSTOP)
        try:
            store.match(actors.KEYS[:1])
        except StoreTimeout:
            return
        holder.send_signal(signal.SIGCONT)
    pytest.fail("it was never stopped while it held the lock")


def test_a_stopped_holder_of_the_lock_is_a_timeout_for_the_others(stopped_holder):
    store, holder, reservation = stopped_holder
    start = time.monotonic()
    assert not store.put_at_once("of_another", b"x"), "it does not wait to put a marker"
    assert time.monotonic() - start < 0.1
    with pytest.raises(StoreTimeout, match="locked"):
        store.which_stored(actors.KEYS)
    assert time.monotonic() - start < 5
    with pytest.raises(StoreTimeout):
        store.abandon(reservation)
    holder.send_signal(signal.SIGCONT)

    def has_all_back():
        with contextlib.suppress(StoreTimeout):
            assert store.match(actors.KEYS[:1]) == 1
            return store.counts().reserved == 0  # also what was abandoned meanwhile
        return False

    eventually(has_all_back, 20)


def test_every_close_ends_in_time_though_a_stopped_process_holds_the_lock(tmp_path):
    settings = settings_of(
        store=f"shm://large?dir={tmp_path}", native="require", drain_s=0.2, deadline_s=20.0
    )
    with contextlib.closing(actors.open_large(tmp_path, lock_timeout_s=0.2)) as store:
        layout = Layout.of(
            settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope=""
        )
        namespace = layout.namespace(settings, weights="w")
        cache = PrefixCacheManager(settings, namespace)
        pool = KVPool(settings, layout, caches_of(layout), namespace)
        pool.ready()
        with actor("count_for_ever", tmp_path) as holder:
            stop_with_the_lock(store, holder)
            keys = cache.keys(range(64))
            handoff, params = cache.announce(keys)
            cache.lookup(keys, params)
            pool.save(keys, range(4), handoff=handoff)
            for each in (pool, cache, store):
                begin = time.monotonic()
                each.close()
                assert time.monotonic() - begin < settings.drain_s + 2, each


def test_a_killed_holder_of_the_lock_is_none(stopped_holder):
    store, holder, _ = stopped_holder
    seen = store.wait_for_change(None, 0)
    holder.kill()
    holder.wait(10)
    assert store.match(actors.KEYS[:1]) == 1
    assert store.wait_for_change(seen, 0) != seen, "it may have stored something untold"
