"""pdstore's counters on their way to vLLM's /metrics: nothing is lost, nothing counted twice."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from pdstore.adapters.vllm.stats import PDStorePromMetrics, StepMetrics, stats_of
from pdstore.errors import Direction, Reason


@pytest.fixture
def metrics():
    return StepMetrics()


def test_what_happened_is_returned_once(metrics):
    metrics.miss(Reason.LOST)
    metrics.tokens.labels("loaded").inc(900)
    assert metrics.pop().data == {"misses|lost": 1, "tokens|loaded": 900}
    metrics.tokens.labels("loaded").inc(1)
    assert metrics.pop().data == {"tokens|loaded": 1}
    assert metrics.pop() is None


def test_steps_and_processes_add_up_and_vllms_log_has_counts_and_means(metrics):
    other = StepMetrics()
    for each, seconds in ((metrics, 0.25), (other, 0.75)):
        each.job_ended(Direction.LOAD, None, seconds)
    other.jobs_alive.set(2)
    total = metrics.pop().aggregate(other.pop())
    assert total.data == {
        "jobs|load|ok": 2,
        "job_seconds|load": [0.25, 0.75],
        "jobs_alive": {str(os.getpid()): 2},
    }
    assert total.reduce() == {"jobs load ok": 2, "job_seconds load (mean)": 0.5}
    total.reset()
    assert total.is_empty()


def test_a_connectors_stats_are_found_among_those_of_several(metrics):
    """MultiConnector hands each of its connectors the stats of all, which vLLM reads afterwards."""
    metrics.miss(Reason.LOST)
    own = metrics.pop()
    several = MultiKVConnectorStats({"Other": KVConnectorStats({"n": 1}), "PDStoreConnector": own})
    assert stats_of(own, "PDStoreConnector") is own
    assert stats_of(several, "PDStoreConnector") is own
    assert stats_of(several, "Other") is None
    assert stats_of(None, "PDStoreConnector") is None
    assert set(several.data) == {"Other", "PDStoreConnector"}


def test_the_metrics_page_shows_what_was_observed(metrics):
    registry = CollectorRegistry()
    shown = PDStorePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    metrics.miss(Reason.LOST)
    metrics.job_ended(Direction.SAVE, Reason.STORE_FULL, 0.5)
    metrics.slots_lent.set(3)
    metrics.breaker_open.set(1)
    taken = metrics.pop()
    other = {"slots_lent": {"9": 4}, "breaker_open": {"9": 1}}  # another process's
    shown.observe(other)
    shown.observe(taken.data)
    shown.observe(taken.data)
    labels = {"model_name": "m", "engine": "0"}
    value = registry.get_sample_value
    assert value("pdstore_misses_total", {"reason": "lost", **labels}) == 2
    outcome = {"direction": "save", "outcome": "store_full", **labels}
    assert value("pdstore_jobs_total", outcome) == 2
    assert value("pdstore_drops_total", {"reason": "store_full", **labels}) == 2
    assert value("pdstore_job_seconds_sum", {"direction": "save", **labels}) == 1.0
    assert value("pdstore_slots_lent", labels) == 7
    assert value("pdstore_breaker_open", labels) == 1
    assert value("pdstore_misses_total", {"reason": "corrupt", **labels}) == 0
