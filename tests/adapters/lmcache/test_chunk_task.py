"""ChunkTask: it ends once, with what is done, and no copy outlives it."""

from __future__ import annotations

import pytest

from pdstore.adapters.lmcache.chunk_task import ChunkTask, Ended
from pdstore.errors import StoreTimeout
from pdstore.outcome import Reason
from pdstore.testing.threads import start_background
from tests.support.kv import eventually


@pytest.fixture
def ends():
    return []


@pytest.fixture
def open_task(ends):
    return lambda *, shares=1, timeout_s=60.0: ChunkTask(2, shares, timeout_s, ends.append)


def test_the_last_share_ends_it_and_the_first_reason_counts(open_task, ends):
    task, error = open_task(shares=3), StoreTimeout("late")
    task.note_done(1)
    task.share_ended()
    task.share_ended(Reason.STORE_SLOW, error)
    assert not ends
    task.share_ended(Reason.LOST)
    assert ends == [Ended((False, True), Reason.STORE_SLOW, error)]


def test_there_is_no_reason_where_all_is_done(open_task, ends):
    task = open_task()
    task.note_done(0)
    task.note_done(1)
    task.share_ended(Reason.LOST)
    assert ends == [Ended((True, True))]


def test_it_ends_once(open_task, ends):
    task = open_task()
    task.end(Reason.CLOSED)
    task.share_ended()
    task.end(Reason.DEADLINE)
    assert [ended.reason for ended in ends] == [Reason.CLOSED]


def test_it_ends_at_its_deadline_and_not_before(open_task, ends):
    assert not open_task().end_if_late()
    assert open_task(timeout_s=0.0).end_if_late()
    assert [ended.reason for ended in ends] == [Reason.DEADLINE]


def test_after_the_end_nothing_may_be_copied(open_task):
    task = open_task()
    task.end(Reason.DEADLINE)
    with task.copying() as may_copy:
        assert not may_copy


def test_the_end_waits_for_a_copy(open_task, ends):
    task = open_task()
    with task.copying() as may_copy:
        assert may_copy
        join = start_background(lambda: task.end(Reason.DEADLINE))
        eventually(lambda: task.is_over)
        assert not ends
    join(60.0)
    assert [ended.reason for ended in ends] == [Reason.DEADLINE]
