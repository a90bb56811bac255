"""A real holder is stopped in the middle of a call: no byte of it comes after the call's end.

The library gives such a call up after 30 s, a constant.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from pdstore.errors import StoreError
from pdstore.store.base import Slots
from pdstore.store.mooncake.barrier import KEPT
from pdstore.testing import fresh_keys
from pdstore.testing.values import start_background
from tests.support.kv import eventually
from tests.support.mooncake_cluster import Cluster, kill, stopped, wait_until_it_serves

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

COUNT, SIZE = 48, 4 << 20
LIBRARY_S = 30.0
PATTERN = b"\xee"


@pytest.fixture
def cluster(tmp_path):
    with contextlib.closing(Cluster(tmp_path, segment=1 << 30)) as cluster:
        yield cluster


class Interrupted:
    """A call that fails, on a store of its own; afterwards its slots belong to somebody else."""

    def __init__(self, cluster, verb) -> None:
        self.store = cluster.connect(cluster.shared_url)
        wait_until_it_serves(self.store)
        view = self.store.allocate(COUNT * SIZE)
        self.slots = Slots(view, SIZE, range(COUNT), [SIZE] * COUNT)
        self.keys, self.has_ended = fresh_keys(COUNT), threading.Event()
        for i in range(COUNT):
            self.slots.value(i)[:] = bytes([i + 1]) * SIZE
        if verb == "get":
            assert self.store.put(self.keys, self.slots) == COUNT
            view[:] = bytes(len(view))
        self._call = getattr(self.store, verb)

    def begin(self) -> None:
        def call():
            with pytest.raises(StoreError):
                self._call(self.keys, self.slots)
            self.slots.view[:] = PATTERN * len(self.slots.view)
            self.has_ended.set()

        self.join = start_background(call)

    @property
    def is_kept(self) -> bool:
        return KEPT in self.store.codes() and not self.has_ended.is_set()

    def assert_nothing_came(self) -> None:
        assert all(self.slots.value(i) == PATTERN * SIZE for i in range(COUNT))

    def assert_heals(self) -> None:
        """The same slots work again, once the library has noticed what happened."""
        eventually(self._serves_all, LIBRARY_S)
        self.assert_nothing_came()

    def _serves_all(self) -> bool:
        keys = fresh_keys(COUNT)
        self.slots.view[:] = PATTERN * len(self.slots.view)
        with contextlib.suppress(StoreError):
            is_put = self.store.put(keys, self.slots) == COUNT
            self.slots.view[:] = bytes(len(self.slots.view))
            return is_put and self.store.get(keys, self.slots) == COUNT
        return False


def stop_in_the_middle_of(get, cluster) -> None:
    get.begin()
    eventually(lambda: get.slots.view[0])
    cluster.holder.send_signal(signal.SIGSTOP)


@pytest.mark.nightly  # a constant of the library: 30 s
def test_calls_that_the_library_gave_up_end_with_their_transfers(cluster):
    """Before, they ended after 30 s, and their transfers went on in slots of other blocks."""
    calls = [Interrupted(cluster, verb) for verb in ("get", "get", "put", "get")]
    in_the_middle, closed, put, _ = calls
    stop_in_the_middle_of(in_the_middle, cluster)
    for call in calls[1:]:
        call.begin()
    eventually(lambda: all(call.is_kept for call in calls), LIBRARY_S + 10)
    start = time.monotonic()
    closed.store.close()
    assert time.monotonic() - start < 5.0
    assert all(call.is_kept for call in calls)
    cluster.holder.send_signal(signal.SIGCONT)
    for call in calls:
        call.join(15)
    time.sleep(2.0)  # whatever was on its way is here
    for call in calls:
        call.assert_nothing_came()
    calls.remove(closed)
    assert_whole_or_absent(put)
    for call in calls:
        call.slots.view[:] = PATTERN * len(call.slots.view)
        call.assert_heals()
        call.store.close()


def assert_whole_or_absent(put) -> None:
    """A put that was given up has stored its own bytes, or none."""
    wait_until_it_serves(put.store)
    num_stored = put.store.get(put.keys, put.slots)
    for i in range(num_stored):
        assert put.slots.value(i) == bytes([i + 1]) * SIZE


def test_a_call_whose_holder_is_killed_ends_at_once(cluster):
    call = Interrupted(cluster, "get")
    stop_in_the_middle_of(call, cluster)
    kill(cluster.holder)
    call.join(5)
    cluster.start_holder()
    call.assert_nothing_came()
    call.assert_heals()
    call.store.close()


def test_a_store_whose_holder_hangs_closes_without_stopping_the_process(cluster):
    """Rule 8: the library's close would wait for the holder, and keep every thread waiting."""
    call = Interrupted(cluster, "put")
    with stopped(cluster.holder):  # all its threads: one that still runs answers the question
        start = time.monotonic()
        call.store.close()
        assert time.monotonic() - start < LIBRARY_S / 2
