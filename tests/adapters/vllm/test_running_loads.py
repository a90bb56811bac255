"""RunningLoads: each load's end is told once."""

from __future__ import annotations

import pytest

from pdstore.adapters.vllm.messages import LoadSpec
from pdstore.adapters.vllm.running_loads import RunningLoads
from pdstore.metrics import Metrics
from pdstore.outcome import Direction
from pdstore.worker.job import Job, JobResult

IDS = list(range(1, 14))


@pytest.fixture
def loads():
    return RunningLoads(Metrics(), block_tokens=16)


def started(loads, keys, name="a", brought=None, counts_on=200):
    """Starts a load; it has ended if it `brought` tokens."""
    job = Job(Direction.LOAD, lambda *_: None)
    loads.put(LoadSpec(name, keys, [IDS], 0, counts_on), job)
    if brought is not None:
        job.settle(JobResult(brought))
    return job


@pytest.fixture
def keys():
    return object()  # nobody looks into them


def test_a_load_is_told_when_it_has_ended(loads, keys):
    job = started(loads, keys)
    assert loads.take() == set()
    job.settle(JobResult(200))
    assert loads.take() == {"a"}
    assert loads.take() == set()
    assert loads.take_outcomes() == (set(), {"a": (200, 0.0)})


def test_a_load_that_fell_short_names_the_blocks_that_it_left(loads, keys):
    started(loads, keys, brought=64)
    assert loads.take() == {"a"}
    assert loads.failed == {"a"}
    assert loads.take_bad_blocks() == set(IDS[4:])


def test_a_load_that_could_not_be_started_is_a_failure_of_all_its_blocks(loads):
    loads.put(LoadSpec("a", None, [IDS], 32, 200), None)
    assert loads.take() == {"a"}
    assert loads.take_bad_blocks() == set(IDS[2:])


def test_a_load_of_a_request_that_has_ended_is_cancelled(loads, keys):
    ends = []
    job = Job(Direction.LOAD, lambda *reason: ends.append(reason))
    loads.put(LoadSpec("a", keys, [IDS], 0, 200), job)
    assert loads.take({"a"}) == set(), "its blocks are written until it has ended"
    assert ends


@pytest.mark.parametrize(("has_keys", "faults"), [(True, 1), (False, None)])
def test_only_a_load_that_could_not_begin_is_a_fault(keys, has_keys, faults):
    """One without keys is to fail, because its hand-off fell short; that is counted."""
    metrics = Metrics()
    loads = RunningLoads(metrics, block_tokens=16)
    loads.put(LoadSpec("a", keys if has_keys else None, [IDS], 0, 200), None)
    assert loads.take() == {"a"}
    value = metrics.registry.get_sample_value("pdstore_misses_total", {"reason": "fault"})
    assert (value or None) == faults
