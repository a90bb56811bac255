"""Reasons: each has words, and is told once in a while, with its cause and what to do."""

from __future__ import annotations

import pickle

import pytest

from pdstore.errors import Cause, Reason, Severity, StoreUnavailable, reasons_with
from pdstore.telemetry.reasons import ADVICE, ReasonLog
from tests.support.clock import Clock


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_every_reason_has_words_in_the_order_of_the_enumeration():
    assert list(ADVICE) == list(Reason)
    assert all(advice.means and advice.look_at for advice in ADVICE.values())


def test_an_error_with_a_remedy_is_told_in_place_of_what_its_reason_usually_means(caplog):
    error = StoreUnavailable("redis://there: read only", remedy="write its master's address")
    ReasonLog().warn("a save", Reason.STORE_DOWN, error)
    said = "a save fell short (store_down): redis://there: read only; write its master's address"
    assert lines(caplog) == [said]


def test_each_reason_is_told_once_in_a_while_and_what_was_left_out_is_counted(caplog):
    clock = Clock()
    reasons = ReasonLog(interval_s=60.0, clock=clock)
    for _ in range(5):
        reasons.warn("a load", Reason.LOST)
        reasons.warn("a load", Reason.CORRUPT)
    reasons.warn("a save", Reason.LOST)
    assert len(lines(caplog)) == 3
    clock.now += 61.0
    reasons.warn("a load", Reason.LOST)
    assert "(4 more like it" in lines(caplog)[-1]


@pytest.mark.parametrize("reason", Reason)
def test_only_what_is_no_fault_or_told_elsewhere_is_quiet(caplog, reason):
    ReasonLog().warn("a load", reason)
    is_told_elsewhere = reason in (Reason.NAMESPACE, Reason.OTHER_POOL)
    is_fault = not ADVICE[reason].look_at.startswith("nothing")
    assert bool(lines(caplog)) is (is_fault and not is_told_elsewhere)


def test_there_is_nothing_to_look_at_exactly_for_reasons_that_are_no_fault():
    no_fault = [r for r in Reason if r.severity in (Severity.ORDINARY, Severity.NOTICE)]
    assert no_fault == [r for r in Reason if ADVICE[r].look_at.startswith("nothing")]


def test_each_class_has_reasons_and_a_reason_is_still_its_text():
    assert all(reasons_with(cause) for cause in Cause)
    assert reasons_with(*Cause) == set(Reason)
    for reason in Reason:
        assert reason == reason.value == Reason(reason.value) == reason.name.lower()
        assert pickle.loads(pickle.dumps(reason)) is reason
