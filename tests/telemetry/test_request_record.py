"""RequestRecord: one line says what a request cost and why; times are those of its phases."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from pdstore.errors import Reason
from pdstore.telemetry.request_record import (
    Journal,
    Loss,
    Phase,
    RequestRecord,
    RequestTimer,
    plain,
)
from tests.support.clock import Clock

RECORD = RequestRecord(
    request_id="r-1",
    handoff="ab" * 16,
    role="decode",
    arrived_at=1000.0,
    num_tokens=100,
    num_matched=100,
    num_loaded=64,
    num_computed=36,
    num_saved=0,
    reason=Reason.LOST,
    phases=(Phase("wait", 0.0, 0.25), Phase("load", 0.25, 0.5)),
)


def test_the_line_has_ids_tokens_seconds_and_the_reason():
    assert RECORD.line() == (
        f"request r-1: hand-off {'ab' * 16}, 100 tokens (100 matched, 64 loaded, 36 computed,"
        " 0 saved); wait 0.250 s, load 0.250 s; lost"
    )


@pytest.mark.parametrize(
    ("age_s", "lease_s", "end"),
    [
        (19.7, 10.0, "after its lease of 10 s"),
        (2.0, 10.0, "within its lease of 10 s"),
        (19.7, 0.0, "and this store promises no lease"),
    ],
)
def test_a_loss_is_told_with_its_age_against_the_lease(age_s, lease_s, end):
    loss = Loss(9000, 4000, Reason.LOST, age_s, lease_s)
    record = replace(RECORD, loss=loss)
    words = (
        "4,000 of 9,000 promised tokens were not loaded (lost):"
        f" they were gone {age_s} s after the last lookup, {end}"
    )
    assert record.line() == f"{RECORD.line()}; {words}"
    told = {"num_promised": 9000, "num_lost": 4000, "reason": "lost", "words": words}
    assert record.as_json()["loss"] == told | {"age_s": age_s, "lease_s": lease_s}


def test_a_clients_text_cannot_forge_a_line():
    assert plain("a\nrequest b\x1b[31m" + "x" * 200) == ("a?request b?[31m" + "x" * 200)[:80]


def test_phases_come_in_order_begin_once_and_may_still_run():
    clock = Clock()
    timer = RequestTimer(clock)
    timer.end("load")  # it has not begun
    clock.now += 1
    timer.begin("wait")
    clock.now += 1
    timer.begin("load")
    timer.begin("wait")
    timer.end("wait")
    clock.now += 1
    assert timer.phases() == (Phase("wait", 1.0, 2.0), Phase("load", 2.0, 3.0))
    timer.end("wait")  # a save of another chunk, say
    assert timer.phases()[0] == Phase("wait", 1.0, 3.0)
    assert timer.elapsed_s == 3.0


def test_each_request_is_a_line_and_the_last_ones_are_kept(caplog):
    caplog.set_level(logging.INFO)
    journal, heard = Journal(most=2), []
    journal.listen(heard.append)
    for name in "abc":
        journal.add(replace(RECORD, request_id=name))
    assert [record.request_id for record in journal.last()] == ["b", "c"]
    assert [record.request_id for record in heard] == ["a", "b", "c"]
    assert caplog.text.count("request ") == 3
