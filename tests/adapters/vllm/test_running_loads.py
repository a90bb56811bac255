"""RunningLoads: each load's end is told once, by one of two ways."""

from __future__ import annotations

import pytest

from pdstore.adapters.vllm.messages import LoadSpec
from pdstore.adapters.vllm.running_loads import RunningLoads
from pdstore.metrics import Metrics
from tests.support.jobs import Shares, job_of

IDS = list(range(1, 14))


@pytest.fixture
def loads():
    return RunningLoads(Metrics(), block_tokens=16)


@pytest.fixture
def near(loads):
    loads.is_near = True
    return loads


def started(loads, keys, name="a", brought=None, counts_on=200):
    """Starts a load; it has ended if it `brought` tokens."""
    work = Shares()
    work.tokens = 200 if brought is None else brought
    job = job_of(work)
    loads.put(LoadSpec(name, keys, [IDS], 0, counts_on), job)
    if brought is not None:
        job.end(None)
    return job


@pytest.fixture
def keys():
    return object()  # nobody looks into them


def test_a_load_is_told_when_it_has_ended(loads, keys):
    job = started(loads, keys)
    assert loads.take() == set()
    job.end(None)
    assert loads.take() == {"a"}
    assert loads.take() == set()
    assert loads.take_outcomes() == (set(), {"a": (200, 0.0)})


def test_a_load_that_brought_all_is_left_once_to_the_one_who_asks_next(near, keys):
    started(near, keys, brought=200)
    assert near.take() == set()
    assert near.take_complete() == {"a"}
    assert near.take() == set()


def test_a_load_that_is_left_and_not_taken_is_told_at_the_next_look(near, keys):
    started(near, keys, brought=200)
    assert near.take() == set()
    assert near.take() == {"a"}
    assert near.take_complete() == set()


def test_a_load_that_fell_short_is_never_left(near, keys):
    started(near, keys, brought=64)
    assert near.take_complete() == set()
    assert near.take() == {"a"}
    assert near.failed == {"a"}
    assert near.take_bad_blocks() == set(IDS[4:])


def test_a_load_that_could_not_be_started_is_a_failure_of_all_its_blocks(loads):
    loads.put(LoadSpec("a", None, [IDS], 32, 200), None)
    assert loads.take() == {"a"}
    assert loads.take_bad_blocks() == set(IDS[2:])


def test_a_load_of_a_request_that_has_ended_is_cancelled(loads, keys):
    job = job_of()
    loads.put(LoadSpec("a", keys, [IDS], 0, 200), job)
    assert loads.take({"a"}) == set(), "its blocks are written until it has ended"
    assert job.done


@pytest.mark.parametrize(("has_keys", "faults"), [(True, 1), (False, None)])
def test_only_a_load_that_could_not_begin_is_a_fault(keys, has_keys, faults):
    """One without keys is to fail, because its hand-off fell short; that is counted."""
    metrics = Metrics()
    loads = RunningLoads(metrics, block_tokens=16)
    loads.put(LoadSpec("a", keys if has_keys else None, [IDS], 0, 200), None)
    assert loads.take() == {"a"}
    value = metrics.registry.get_sample_value("pdstore_misses_total", {"reason": "fault"})
    assert (value or None) == faults
