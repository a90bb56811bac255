"""IdleWorkers: as many wake as there is work for, and those that may do it."""

from __future__ import annotations

import threading

import pytest

from pdstore.outcome import Direction
from pdstore.worker.idle_workers import LOADS_ONLY, SAVES_ONLY, IdleWorkers, serves
from tests.support.kv import eventually


class Sleepers:
    """Threads that wait as workers 0 to n - 1, in this order, and say when they are woken."""

    def __init__(self, count: int) -> None:
        self.lock = threading.RLock()
        self.idle = IdleWorkers(self.lock)
        self.num_asleep = 0
        self.woken: list[int] = []
        for n in range(count):
            threading.Thread(target=self._sleep, args=(n,), daemon=True).start()
            eventually(lambda n=n: self._asleep() == n + 1)

    def _sleep(self, worker: int) -> None:
        with self.lock:
            self.num_asleep += 1
            self.idle.wait(worker)
            self.woken.append(worker)

    def _asleep(self) -> int:
        with self.lock:  # who has it while they count themselves, waits
            return self.num_asleep

    def after(self, wake, count: int) -> set[int]:
        """Calls `wake` with the lock; returns who woke, `count` of them."""
        with self.lock:
            wake()
        eventually(lambda: len(self.woken) >= count)
        return set(self.woken)


@pytest.fixture
def sleepers():
    sleepers = Sleepers(5)
    yield sleepers
    sleepers.after(sleepers.idle.wake_all, 5)


@pytest.mark.parametrize(
    ("direction", "own"), [(Direction.LOAD, LOADS_ONLY), (Direction.SAVE, SAVES_ONLY)]
)
def test_one_piece_of_work_wakes_one_worker_the_one_that_does_nothing_else(
    sleepers, direction, own
):
    assert sleepers.after(lambda: sleepers.idle.wake(direction, 1), 1) == {own}


def test_of_the_others_those_that_waited_least_wake_first(sleepers):
    wake = sleepers.idle.wake
    assert sleepers.after(lambda: wake(Direction.LOAD, 2), 2) == {LOADS_ONLY, 4}


@pytest.mark.parametrize("direction", list(Direction))
def test_much_work_wakes_all_that_may_do_it_and_no_other(sleepers, direction):
    may = {worker for worker in range(5) if serves(worker, direction)}
    assert len(may) == 4
    assert sleepers.after(lambda: sleepers.idle.wake(direction, 100), 4) == may


def test_a_second_call_wakes_another_one_also_before_the_first_has_woken_up(sleepers):
    def twice():
        for _ in range(2):
            sleepers.idle.wake(Direction.SAVE, 1)

    assert sleepers.after(twice, 2) == {SAVES_ONLY, 4}


def test_all_wake_at_the_end(sleepers):
    assert sleepers.after(sleepers.idle.wake_all, 5) == set(range(5))


def test_a_second_wake_of_those_that_are_awake_already_reaches_nobody(sleepers):
    sleepers.after(sleepers.idle.wake_all, 5)
    assert sleepers.after(lambda: sleepers.idle.wake(Direction.SAVE, 5), 5) == set(range(5))
    assert len(sleepers.woken) == 5
