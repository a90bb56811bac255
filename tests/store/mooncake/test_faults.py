"""A real Mooncake that hangs, dies, fills up and forgets.

Every hand-over ends soon, with a right prefix and a reason, and the next ones work again.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pdstore.errors import JobResult, Reason, StoreError, StoreTimeout, StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.scheduler.lookup import Match
from pdstore.store.base import Slots
from pdstore.store.guard import GuardedStore
from pdstore.store.mooncake.client import PROBE_TIMEOUT_S
from pdstore.testing import fresh_keys
from pdstore.testing.values import content, get, put, put_new, start_background
from tests.support.kv import POISON, Instance, eventually
from tests.support.mooncake_cluster import (
    CLIENT_TTL_S,
    DISCARD_S,
    RPC_S,
    Cluster,
    kill,
    size_of,
    stopped,
    wait_until_it_serves,
)

pytestmark = pytest.mark.mooncake

NUM_TOKENS = 200
P_BLOCKS, D_BLOCKS = list(range(20, 40)), list(range(3, 23))[::-1]
LATEST_S = 8.0  # for a whole hand-over: the wait for the marker, and a call or two that time out
OUTAGE = {Reason.STORE_DOWN, Reason.STORE_SLOW, Reason.HANDOFF_LATE, Reason.DEADLINE}


class Outcome(NamedTuple):
    saved: JobResult
    found: Match
    loaded: JobResult
    seconds: float

    @property
    def is_whole(self) -> bool:
        return self.loaded.num_tokens == NUM_TOKENS

    @property
    def reasons(self) -> set[Reason | None]:
        return {self.saved.reason, self.found.reason, self.loaded.reason}


class Pair:
    """P and D, each with connections of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.stores = [GuardedStore(cluster.connect(), Metrics(), open_s=0.2) for _ in range(2)]
        changes = {"handoff_wait_s": 1.0, "deadline_s": 3.0}
        self.p = Instance(self.stores[0], **changes)
        self.d = Instance(self.stores[1], fill=POISON, **changes)

    def prompt(self) -> list[int]:
        return [random.randrange(1 << 30) for _ in range(NUM_TOKENS)]

    def save(self, tokens: list[int]):
        keys = self.p.cache.keys(tokens)
        attempt, params = self.p.cache.announce(keys)
        return self.p.pool.save(keys, P_BLOCKS, handoff=attempt), params

    def saved(self):
        """Returns a prompt that P has saved, and its hand-off's parameters."""
        job, params = self.save(tokens := self.prompt())
        assert job.wait(LATEST_S).reason is None
        return tokens, params

    def load(self, tokens: list[int], params) -> tuple[Match, JobResult]:
        for cache in self.d.caches:
            cache.fill_(POISON)
        found = self.d.cache.lookup(self.d.cache.keys(tokens), params).wait(LATEST_S)
        loaded = self.d.pool.load(found.keys, D_BLOCKS).wait(LATEST_S)
        self.assert_right(loaded.num_tokens)
        return found, loaded

    def hand_over(self) -> Outcome:
        """A new prompt from P to D, as the engines do it."""
        start, tokens = time.monotonic(), self.prompt()
        job, params = self.save(tokens)
        found, loaded = self.load(tokens, params)
        saved = job.wait(LATEST_S)
        return Outcome(saved, found, loaded, time.monotonic() - start)

    def assert_right(self, num_tokens: int) -> None:
        """Rule 0: what D took is what P has; nothing else was written."""
        for layer in range(len(self.p.caches)):
            got, want = self.d.tokens(D_BLOCKS, layer), self.p.tokens(P_BLOCKS, layer)
            assert torch.equal(got[:num_tokens], want[:num_tokens])
            assert (got[num_tokens:] == POISON).all()

    def assert_heals(self, timeout_s: float = 15.0) -> None:
        eventually(lambda: self.hand_over().is_whole, timeout_s)

    def close(self) -> None:
        for one in (self.p, self.d):
            one.close()
            assert one.pool.num_jobs == 0


@pytest.fixture(scope="module")
def one_pair(cluster):
    with contextlib.closing(Pair(cluster)) as pair:
        yield pair


@pytest.fixture
def pair(one_pair):
    """P and D that live through all the faults, and work now."""
    one_pair.assert_heals()
    return one_pair


def test_a_master_that_hangs_costs_a_bounded_wait_and_a_reason(cluster, pair):
    with stopped(cluster.master):
        for _ in range(2):
            outcome = pair.hand_over()
            assert outcome.loaded.num_tokens == 0
            assert outcome.seconds < LATEST_S
            assert outcome.saved.reason in OUTAGE
            assert outcome.found.reason in OUTAGE
    pair.assert_heals()


def test_no_call_takes_seconds_while_the_master_is_dead(cluster, pair):
    """Rule 7: each of these forty calls would take the library more than four."""
    tokens, params = pair.saved()
    kill(cluster.master)
    start = time.monotonic()
    found, loaded = pair.load(tokens, params)
    assert found.num_tokens == loaded.num_tokens == 0
    assert found.reason in OUTAGE
    for store in pair.stores:
        for _ in range(20):
            with pytest.raises(StoreUnavailable):
                store.match(fresh_keys(1))
    assert pair.hand_over().saved.reason in OUTAGE
    assert time.monotonic() - start < 12.0
    cluster.start_master()
    pair.assert_heals()
    found, loaded = pair.load(tokens, params)
    assert found.num_tokens == 0, "the new master knows nothing of the old one's"
    assert found.reason in (Reason.OTHER_POOL, Reason.HANDOFF_LATE, Reason.ABSENT)


def test_an_instance_that_starts_without_a_master_joins_when_it_appears(cluster):
    kill(cluster.master)
    start = time.monotonic()
    with contextlib.closing(Pair(cluster)) as pair:
        assert pair.hand_over().saved.reason in OUTAGE
        assert time.monotonic() - start < LATEST_S
        cluster.start_master()
        pair.assert_heals()


@pytest.mark.nightly
def test_a_master_that_comes_and_goes_during_the_traffic_costs_misses_only(cluster, pair):
    outcomes, is_over = [], threading.Event()

    def serve():
        while not is_over.is_set():
            outcomes.append(pair.hand_over())

    join = start_background(serve)
    try:
        for _ in range(2):
            with stopped(cluster.master):
                num_before = len(outcomes)
                eventually(lambda n=num_before: len(outcomes) > n)
            eventually(lambda: outcomes[-1].is_whole)
            kill(cluster.master)
            num_before = len(outcomes)
            eventually(lambda n=num_before: len(outcomes) > n + 1)
            cluster.start_master()
            eventually(lambda: outcomes[-1].is_whole, 2 * LATEST_S)
    finally:
        is_over.set()
        join(2 * LATEST_S)
    assert max(outcome.seconds for outcome in outcomes) < LATEST_S
    assert all(o.is_whole or o.reasons - {None} for o in outcomes), "every loss has a reason"


def test_a_holder_that_hangs_costs_a_bounded_wait_and_no_late_bytes(cluster, pair):
    pair.assert_heals()  # of the test before: both know the pool now
    tokens, params = pair.saved()
    with stopped(cluster.holder):
        start = time.monotonic()
        found, loaded = pair.load(tokens, params)
        assert time.monotonic() - start < LATEST_S
        assert found.num_tokens == NUM_TOKENS, "the master still says that it is there"
        assert loaded.num_tokens == 0
        assert loaded.reason in OUTAGE
    pair.assert_right(0)
    pair.assert_heals()
    assert pair.load(tokens, params)[1].num_tokens in (0, NUM_TOKENS)


def test_bytes_of_a_hung_read_never_come_late(cluster):
    keys, size = fresh_keys(16), 1 << 20
    with cluster.open() as store:
        wait_until_it_serves(store)
        put(store, keys, [b"\x55" * size] * 16)
        slots = Slots(store.allocate(16 * size), size, range(16), [size] * 16)
        with stopped(cluster.holder), pytest.raises(StoreError):
            store.get(keys, slots)
        wait_until_it_serves(store)  # the peer that hung has sent what it was going to
        assert bytes(slots.view) == bytes(16 * size)


def test_a_dead_holder_is_lost_then_absent_and_a_new_one_takes_over(cluster, pair):
    tokens, params = pair.saved()
    kill(cluster.holder)
    start = time.monotonic()
    found, loaded = pair.load(tokens, params)
    assert time.monotonic() - start < LATEST_S
    assert loaded.num_tokens == 0
    assert found.reason is not None or loaded.reason in {Reason.LOST, Reason.STORE_SLOW}
    assert pair.hand_over().saved.reason in OUTAGE | {Reason.STORE_FULL, Reason.STORE_ERROR}
    cluster.start_holder()
    pair.assert_heals()
    eventually(lambda: pair.d.cache.match(pair.d.cache.keys(tokens)).reason is Reason.ABSENT)
    assert time.monotonic() - start < CLIENT_TTL_S + LATEST_S


def test_a_writer_killed_in_the_middle_of_a_put_blocks_its_keys_for_a_bounded_time(cluster):
    """Rule 4: until the master frees them, a put of such a key is no success."""
    keys, size = fresh_keys(3), 4 << 20
    values = [content(key, size) for key in keys]
    with cluster.open() as store:
        wait_until_it_serves(store)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, cluster.url, keys[1], str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        with writer:
            assert writer.stdout.readline() == b"connected\n"
            with stopped(cluster.holder):
                writer.stdin.write(b"go\n")
                writer.stdin.flush()
                eventually(lambda: size_of(store, keys[1]) == -703)
                writer.kill()
        eventually(lambda: put(store, keys[:1], values[:1]) == 1)
        start = time.monotonic()
        assert put(store, keys, values) == 1
        assert time.monotonic() - start < LATEST_S
        assert store.match(keys) == 1
        assert get(store, keys, [size] * 3) == values[:1]
        eventually(lambda: put(store, keys, values) == 3, DISCARD_S + 5)
        assert get(store, keys, [size] * 3) == values


_WRITER = """
import sys
from tests.support import mooncake_cluster
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing.values import put
store = open_store(sys.argv[1], Settings())
with mooncake_cluster.mover_of(store):
    print("connected", flush=True)
sys.stdin.readline()
put(store, [sys.argv[2]], [b"x" * int(sys.argv[3])])
"""


def test_a_full_pool_drops_saves_with_a_reason_and_takes_them_when_leases_end(tmp_path):
    flags = ["--eviction_high_watermark_ratio=0.9", "--eviction_ratio=0.1"]
    with (
        contextlib.closing(Cluster(tmp_path, segment=16 << 20, flags=flags)) as cluster,
        contextlib.closing(Pair(cluster)) as pair,
    ):
        pair.assert_heals()
        with cluster.open() as store:
            _fill(store)
            outcome = pair.hand_over()
            assert outcome.saved.reason is Reason.STORE_FULL
            assert not outcome.is_whole
            assert outcome.seconds < LATEST_S
        pair.assert_heals()


def _fill(store) -> None:
    """Leases all there is."""
    for size in (1 << 20, 64 << 10, 4 << 10, 256):
        with contextlib.suppress(StoreError):
            while put(store, fresh_keys(1), [bytes(size)]):
                pass


def test_a_master_that_pauses_for_a_moment_is_no_outage(cluster):
    with cluster.open() as store:
        wait_until_it_serves(store)
        with ThreadPoolExecutor(1) as threads:
            with stopped(cluster.master):
                stored = threads.submit(put_new, store, 3, 64)
                time.sleep(1.5)  # so long can a busy host keep a process waiting
            stored.result(10)


def test_the_library_waits_no_longer_than_it_was_told(cluster):
    with cluster.open() as store:
        wait_until_it_serves(store)
        with stopped(cluster.master):
            start = time.monotonic()
            with pytest.raises(StoreError):
                store.match(fresh_keys(1))
            assert time.monotonic() - start < 5 * RPC_S, "the library's default is 30 s"
            only_asked = f"did not answer within {PROBE_TIMEOUT_S} s"
            with pytest.raises(StoreTimeout, match=only_asked):
                store.match(fresh_keys(1))
