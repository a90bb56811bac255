"""EndedJobs: each job is told once, with its times, those of its calls of the store too."""

from __future__ import annotations

import time

from pdstore.adapters.vllm.ended_jobs import EndedJobs
from pdstore.outcome import Direction, Reason
from tests.support.instances import instance as instance
from tests.support.kv import eventually

PROMPT, TABLE = list(range(1, 201)), list(range(13))


def test_a_save_and_a_load_are_told_once_with_their_times(instance):
    one, ended = instance(), EndedJobs()
    keys = one.cache.keys(PROMPT)
    begin = time.time()
    ended.watch("r", one.pool.save(keys, TABLE), number=3)
    [save] = eventually(ended.take)
    job = one.pool.load(keys, TABLE)
    job.wait(10)  # a job may be over before it is watched
    ended.watch("r", job)
    [load] = eventually(ended.take)
    assert ended.take() == []
    assert (save.request_id, save.number, save.direction) == ("r", 3, Direction.SAVE)
    assert (load.number, load.direction, load.num_tokens) == (None, Direction.LOAD, len(PROMPT))
    for job in (save, load):
        assert begin <= job.ran.begin_at <= job.in_store.begin_at <= job.in_store.end_at
        assert job.in_store.end_at <= job.ran.end_at <= time.time()


def test_a_job_that_asked_the_store_nothing_says_why_it_ended(instance):
    one, ended = instance(), EndedJobs()
    one.pool.close()
    ended.watch("r", one.pool.load(one.cache.keys(PROMPT), TABLE))
    [load] = eventually(ended.take)
    assert (load.reason, load.in_store) == (Reason.CLOSED, None)


def test_an_end_is_waited_for_and_then_taken_once(instance):
    one, ended = instance(), EndedJobs()
    ended.wait(0.001)
    assert ended.take() == []
    keys = one.cache.keys(PROMPT)
    job = one.pool.save(keys, TABLE)
    ended.watch("r", job)
    for _ in range(2):  # the second call finds what the first one heard
        ended.wait(30.0)
        assert job.done
    assert [job.request_id for job in ended.take()] == ["r"]
    assert ended.take() == []
