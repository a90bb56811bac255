"""BusyTime: overlapping work counts once."""

from __future__ import annotations

from pdstore.worker.busy_time import BusyTime
from tests.support.clock import Clock


def test_time_counts_once_however_many_are_at_work_and_pauses_do_not():
    clock = Clock()
    busy = BusyTime(clock)
    with busy:
        clock.now += 1
        with busy:
            clock.now += 2
        clock.now += 4
    clock.now += 100
    with busy:
        clock.now += 8
    assert busy.seconds == 15
