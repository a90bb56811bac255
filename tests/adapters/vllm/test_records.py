"""Records: a request is one record when it has finished and its jobs have ended on all ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from pdstore.adapters.vllm.messages import EndedJob, Interval
from pdstore.adapters.vllm.records import Records
from pdstore.adapters.vllm.request import RequestTracker
from pdstore.format.handoff import HandoffId
from pdstore.outcome import Direction, Reason
from pdstore.telemetry.journal import Journal
from tests.support.clock import Clock

NUM_TOKENS = 100


@pytest.fixture
def journal():
    return Journal()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def records(journal, clock):
    return Records(journal, "prefill", patience_s=60, clock=clock)


def tracker_of(num_jobs, **more):
    request = SimpleNamespace(
        request_id="cmpl-7",
        num_prompt_tokens=NUM_TOKENS,
        num_computed_tokens=0,
        num_output_tokens=0,
        trace_headers={"traceparent": "00-aa-bb-01"},
    )
    return RequestTracker(request, keys=None, num_jobs=num_jobs, **more)


def ended(direction, num_tokens=NUM_TOKENS, reason=None, number=None, begin=0.0):
    at = time.time() + begin
    return EndedJob(
        "cmpl-7", number, direction, num_tokens, reason, Interval(at, at + 1), Interval(at, at)
    )


def test_a_record_waits_for_the_saves_of_every_rank(records, journal):
    handoff = HandoffId.new()
    tracker = tracker_of(num_jobs=4, handoff=handoff)
    tracker.scheduled(64)
    tracker.request.num_computed_tokens = 64
    tracker.scheduled(64)
    first = [ended(Direction.SAVE, 64, number=0), ended(Direction.SAVE, 48, number=0)]
    records.take(first, {"cmpl-7": tracker})
    records.finish(tracker)
    assert records.is_waiting
    assert journal.last() == []
    records.take([ended(Direction.SAVE, number=1)] * 2, {})
    [record] = journal.last()
    assert not records.is_waiting
    assert (record.handoff, record.num_computed, record.num_saved) == (handoff.hex, 100, 100)
    assert {phase.name for phase in record.phases} == {"compute", "save"}
    assert record.traceparent == "00-aa-bb-01"


@pytest.mark.parametrize(
    ("handoff", "num_saved"), [(None, 48), (HandoffId.new(), 100)], ids=["plain", "hand-off"]
)
def test_a_save_that_fell_short_ends_what_is_saved_but_for_a_hand_off_that_saves_it_again(
    records, journal, handoff, num_saved
):
    tracker = tracker_of(num_jobs=3, handoff=handoff, is_announced=handoff is not None)
    saves = [
        ended(Direction.SAVE, number=7),
        ended(Direction.SAVE, 32, number=5),
        ended(Direction.SAVE, 48, Reason.LOST, number=6),
    ]
    records.take(saves, {"cmpl-7": tracker})
    records.finish(tracker)
    [record] = journal.last()
    assert (record.num_saved, record.reason) == (num_saved, Reason.LOST)


def test_what_all_ranks_have_loaded_counts_but_for_the_token_that_is_computed_again(
    records, journal
):
    tracker = tracker_of(num_jobs=2, num_computed=16)
    loads = [ended(Direction.LOAD), ended(Direction.LOAD, 64, Reason.LOST)]
    records.take(loads, {"cmpl-7": tracker})
    records.finish(tracker)
    [record] = journal.last()
    assert (record.num_loaded, record.reason) == (48, Reason.LOST)
    assert [part.name for part in record.in_store] == ["load"]


def test_a_job_that_never_ends_delays_a_record_by_its_patience_at_most(records, journal, clock):
    records.finish(tracker_of(num_jobs=1))
    assert records.is_waiting
    clock.now += 61
    assert not records.is_waiting
    assert len(journal.last()) == 1


def test_the_end_of_the_instance_makes_the_records_that_are_left(records, journal):
    records.finish(tracker_of(num_jobs=1))
    records.close()
    assert len(journal.last()) == 1


def test_the_jobs_of_requests_that_it_does_not_know_are_nothing(records, journal):
    records.take([ended(Direction.LOAD)], {})
    assert journal.last() == []
