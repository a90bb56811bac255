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


def test_who_waits_is_woken_by_the_end_of_a_job(instance):
    one, ended = instance(), EndedJobs()
    ended.watch("r", one.pool.save(one.cache.keys(PROMPT), TABLE))
    began = time.monotonic()
    ended.wait(60)
    assert len(ended.take()) == 1
    assert time.monotonic() - began < 30


def test_nobody_waits_for_an_end_that_was_not_taken_yet(instance):
    one, ended = instance(), EndedJobs()
    job = one.pool.save(one.cache.keys(PROMPT), TABLE)
    ended.watch("r", job)
    job.wait(10)
    began = time.monotonic()
    ended.wait(60)
    assert time.monotonic() - began < 30


def test_a_wait_without_an_end_lasts_its_time():
    began = time.monotonic()
    EndedJobs().wait(0.01)
    assert time.monotonic() - began >= 0.01


def test_a_job_that_asked_the_store_nothing_says_why_it_ended(instance):
    one, ended = instance(), EndedJobs()
    one.pool.close()
    ended.watch("r", one.pool.load(one.cache.keys(PROMPT), TABLE))
    [load] = eventually(ended.take)
    assert (load.reason, load.in_store) == (Reason.CLOSED, None)
