"""An arena that processes share: some are killed or stopped, and bytes of it are damaged."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pdstore import KVPool, Layout, PrefixCacheManager
from pdstore.errors import StoreError, StoreFull, StoreTimeout
from pdstore.format.keys import BlockKey
from pdstore.testing.values import empty_slots
from tests.store.arena import actors
from tests.support.kv import LAYERS, POISON, Instance, caches_of, eventually, patience, settings_of

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
    """True if the whole arena can be filled again, with values of a size that nobody used."""
    slots = empty_slots([store.span_bytes] * 8)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        store.clear(actors.NAMESPACE)
        keys = [BlockKey(f"pds1:{actors.NAMESPACE}:0:0:all{i}") for i in range(8)]
        with contextlib.suppress(StoreFull):  # not even one has come back
            store.put(keys, slots)
        if store.match(keys) == 8:
            store.clear(actors.NAMESPACE)
            return True
        time.sleep(0.02)  # what the dead had reserved rests
    return False


@pytest.mark.requirement(
    "R-PIN-10", "memory is unregistered in order, and a killed owner leaves nothing wrong"
)
@pytest.mark.parametrize("times", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_processes_killed_anywhere_leave_only_misses(tmp_path, times):
    order = random.Random(times)
    with (
        contextlib.closing(actors.open_store(tmp_path)) as store,
        actor("kill_writers", tmp_path, times, 1) as killer,
    ):
        end = time.monotonic() + DEADLINE_S + 0.3 * times
        while killer.poll() is None:
            assert time.monotonic() < end
            keys = order.sample(actors.KEYS, 6)
            actors.read(store, keys)
        assert (killer.stdout.read().strip(), killer.returncode) == ("done", 0)
        assert store.counts().reserved <= len(actors.KEYS)
        assert all_slots_come_back(store)
        actors.write(store, actors.KEYS[:20])
        assert store.match(actors.KEYS[:20]) == 20


@pytest.fixture
def stopped_holder(tmp_path, closed_after):
    """A store, and a process that was stopped while it held the lock."""
    store = closed_after(actors.open_large(tmp_path, lock_timeout_s=0.2))
    with actor("count_for_ever", tmp_path) as holder:
        stop_with_the_lock(store, holder)
        yield store, holder


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
    store, holder = stopped_holder
    start = time.monotonic()
    assert time.monotonic() - start < 0.1
    with pytest.raises(StoreTimeout, match="locked"):
        store.which_stored(actors.KEYS)
    assert time.monotonic() - start < 5
    holder.send_signal(signal.SIGCONT)

    def goes_on():
        with contextlib.suppress(StoreTimeout):
            return store.match(actors.KEYS[:1]) == 1
        return False

    eventually(goes_on, 20)


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
                assert time.monotonic() - begin < (settings.drain_s + 2) * patience(), each


def test_a_killed_holder_of_the_lock_is_none(stopped_holder):
    store, holder = stopped_holder
    seen = store.wait_for_change(None, 0)
    holder.kill()
    holder.wait(10)
    assert store.match(actors.KEYS[:1]) == 1
    assert store.wait_for_change(seen, 0) != seen, "it may have stored something untold"


MIB = 1 << 20
PROMPT, BLOCKS = range(600), range(1, 39)


def mapped(store) -> mmap.mmap:
    """The whole file, as another process of this user could map it."""
    fd = os.open(store.path, os.O_RDWR)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def damage(file: mmap.mmap, order: random.Random, end: int) -> None:
    """Overwrites up to 16 bytes in each of some places before `end`."""
    for _ in range(order.choice((1, 4, 40))):
        at = order.randrange(64, end)
        for i in range(at, min(end, at + order.randint(1, 16))):
            file[i] = order.choice((0, 255, order.randrange(256)))


def load_of(d: Instance) -> int:
    """Loads the prompt into poisoned blocks; returns how many tokens came, all compared."""
    for cache in d.caches:
        cache.fill_(POISON)
    result = d.pool.load(d.cache.keys(PROMPT), list(BLOCKS)).wait(20)
    return result.num_tokens


def test_damage_anywhere_costs_tokens_and_never_gives_a_wrong_one(open_arena, closed_after):
    store = open_arena(size=8 * MIB, slab_bytes=MIB, lock_timeout_s=0.5)
    p = closed_after(Instance(store))
    d = closed_after(Instance(open_arena(lock_timeout_s=0.5), fill=POISON))
    file, order, lost = mapped(store), random.Random(3), 0
    data_at = len(file) - 8 * MIB
    used = 200_000  # of the index: header, slabs, chains' heads, the first slots
    for turn in range(24):
        p.pool.save(p.cache.keys(PROMPT), list(BLOCKS)).wait(20)
        damage(file, order, (20_000, used, data_at, len(file))[turn % 4])
        num_tokens = load_of(d)
        for mine, theirs in zip(d.caches, p.caches, strict=True):
            ids = list(BLOCKS)
            right = mine[ids].flatten(0, 1)[:num_tokens], theirs[ids].flatten(0, 1)[:num_tokens]
            assert torch.equal(*right)
        lost += num_tokens < len(PROMPT)
        try:
            store.clear(p.namespace.hex)
        except StoreError:
            store.counts()  # it was rebuilt
    assert 0 < lost < 24
    file.close()
