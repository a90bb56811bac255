"""CallWatch: a call of the store that takes too long is seen by others."""

from __future__ import annotations

import contextlib

from pdstore.scheduler.call_watch import CallWatch


def test_a_call_is_stuck_only_after_its_time_and_while_it_runs():
    patient, impatient = CallWatch(60.0), CallWatch(0.0)
    assert not impatient.is_stuck
    with patient.calling(), impatient.calling():
        assert not patient.is_stuck
        assert impatient.is_stuck
    assert not impatient.is_stuck


def test_a_call_that_raises_has_ended():
    watch = CallWatch(0.0)
    with contextlib.suppress(ValueError), watch.calling():
        raise ValueError
    assert not watch.is_stuck
