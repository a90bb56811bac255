"""A failed call keeps its memory until nobody can write to it any more: with doubles."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.store.mooncake.barrier import KEPT, Answer, Barrier
from pdstore.store.mooncake.client import Client, State
from pdstore.store.mooncake.memory import Memory
from pdstore.testing.threads import start_background
from tests.support.kv import eventually
from tests.support.mooncake_double import RawDouble


class Case:
    """A barrier, what it stands between, and the objects that its client makes in turn."""

    def __init__(self, server, *, shares: bool) -> None:
        self.raw, self.other, self.server = RawDouble(), RawDouble(), server
        left = [self.raw, self.other]
        self.memory = Memory(None)
        self.client = Client("x", server, lambda: left.pop(0))
        sharer = server if shares else None
        self.barrier = Barrier("x", self.client, self.memory, sharer, pause_s=0.001)
        with self.client.call():
            self.memory.connect(self.raw)
        self.view = self.memory.allocate(1 << 20)

    def answer(self, code, seconds=1.0) -> Answer:
        return Answer(self.raw, [code], seconds)

    def start_waiting(self, code=-900, seconds=1.0) -> SimpleNamespace:
        """Waits after such an answer, on a thread; `has_ended` says whether that is over."""
        over = threading.Event()

        def wait():
            self.barrier.wait_after(self.answer(code, seconds))
            over.set()

        join = start_background(wait)
        eventually(lambda: self.client.codes[KEPT])
        return SimpleNamespace(join=join, has_ended=over.is_set)

    def attempts(self) -> None:
        """Returns when the barrier has tried twice more."""
        asked = self.server.num_asked
        eventually(lambda: self.server.num_asked > asked + 1)


@pytest.fixture
def shared(server):
    return Case(server, shares=True)


@pytest.fixture
def direct(server):
    return Case(server, shares=False)


@pytest.mark.parametrize(
    ("code", "state"),
    [(-1, State.HANGS), (-900, State.HANGS), (-901, State.HANGS), (-900, State.UNREACHABLE)],
)
def test_shared_memory_is_kept_while_the_other_process_may_live_and_others_are_refused(
    shared, code, state
):
    shared.server.state = state
    waiting = shared.start_waiting(code)
    shared.attempts()
    assert not waiting.has_ended()
    with pytest.raises(StoreUnavailable, match="under way"), shared.client.call():
        pass
    shared.server.state = State.ANSWERS
    waiting.join(5)
    assert shared.raw.buffers == []
    assert shared.raw.is_closed
    with shared.client.call() as raw:
        assert raw is shared.other, "requests of the old connection mean nothing to the new one"


@pytest.mark.parametrize("fault", ["ping", "unregister"])
def test_an_answer_is_no_proof_before_the_memory_is_forgotten(shared, fault):
    if fault == "ping":
        shared.raw.health = 2
    else:
        shared.raw.unregister_codes = [-900] * 1000
    waiting = shared.start_waiting()
    shared.attempts()
    assert not waiting.has_ended()
    assert not shared.raw.is_closed
    shared.raw.health = 0
    shared.raw.unregister_codes = []
    waiting.join(5)


def test_a_process_that_ended_writes_no_more_and_the_connection_stays(shared):
    shared.server.state = State.GONE
    shared.barrier.wait_after(shared.answer(-900))
    shared.server.state = State.ANSWERS
    with shared.client.call() as raw:
        assert raw is shared.raw, "it finds the successor by itself"


def test_the_connection_is_not_replaced_while_another_call_runs_on_it(shared):
    with shared.client.call():
        waiting = shared.start_waiting()
        shared.attempts()
        assert not waiting.has_ended()
        assert not shared.raw.is_closed
    waiting.join(5)
    assert shared.raw.is_closed


def test_a_call_waits_on_when_the_store_is_closed_meanwhile(shared):
    shared.server.state = State.HANGS
    waiting = shared.start_waiting()
    shared.memory.disconnect()
    shared.client.close()
    shared.attempts()
    assert not waiting.has_ended()
    assert not shared.raw.is_closed
    shared.server.state = State.ANSWERS
    waiting.join(5)
    assert shared.raw.is_closed


def test_a_direct_transfer_that_the_library_gave_up_ends_with_its_connection(direct):
    direct.barrier.wait_after(direct.answer(-800, 61.0))
    assert direct.raw.is_closed
    assert direct.client.codes[KEPT] == 1
    with direct.client.call() as raw:
        assert raw is direct.other


@pytest.mark.parametrize(("code", "seconds"), [(-800, 5.0), (-900, 5.0), (4096, 100.0)])
def test_a_direct_transfer_that_failed_in_time_or_was_slow_is_over(direct, code, seconds):
    direct.barrier.wait_after(direct.answer(code, seconds))
    assert not direct.raw.is_closed
