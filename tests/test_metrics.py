"""Metrics: what is counted under which label, from any thread."""

from __future__ import annotations

import re

import pytest

from pdstore.errors import Direction, Reason, StoreFull, StoreUnavailable
from pdstore.metrics import METRICS, Kind, Metrics, known_labels


@pytest.fixture
def metrics():
    return Metrics()


def value(metrics, name, **labels) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.requirement("R-AR-9, C19", "counters say what happened")
def test_a_job_counts_its_outcome_its_time_and_its_miss_or_drop(metrics):
    metrics.job_ended(Direction.LOAD, Reason.LOST, 0.3)
    metrics.job_ended(Direction.SAVE, Reason.STORE_FULL, 0.3)
    metrics.job_ended(Direction.SAVE, None, 0.3)
    assert value(metrics, "pdstore_jobs_total", direction="load", outcome="lost") == 1
    assert value(metrics, "pdstore_jobs_total", direction="save", outcome="ok") == 1
    assert value(metrics, "pdstore_job_seconds_sum", direction="save") == pytest.approx(0.6)
    assert value(metrics, "pdstore_misses_total", reason="lost") == 1
    assert value(metrics, "pdstore_drops_total", reason="store_full") == 1
    assert value(metrics, "pdstore_misses_total", reason="store_full") == 0


def test_a_lookup_counts_its_tokens_and_its_miss(metrics):
    metrics.lookup_ended(90, 64, Reason.ABSENT)
    metrics.lookup_ended(100, 100, None)
    metrics.lookup_ended(500, 0, Reason.CANCELLED)  # it got no answer
    metrics.lookup_ended(500, 0, Reason.CLOSED)
    assert value(metrics, "pdstore_tokens_total", verb="requested") == 190
    assert value(metrics, "pdstore_tokens_total", verb="matched") == 164
    assert value(metrics, "pdstore_misses_total", reason="absent") == 1


def test_one_open_breaker_of_several_shows(metrics):
    states = [False, False]
    for i in range(2):
        metrics.add_breaker(lambda i=i: states[i])
    assert value(metrics, "pdstore_breaker_open") == 0
    states[1] = True
    assert value(metrics, "pdstore_breaker_open") == 1


def test_every_metric_of_the_table_is_there_with_the_labels_that_are_known(metrics):
    families = {family.name: family for family in metrics.registry.collect()}
    assert set(families) == {f"pdstore_{name}" for name in METRICS}
    for name, metric in METRICS.items():
        family = families[f"pdstore_{name}"]
        assert (family.type, family.documentation) == (metric.kind.value, metric.text)
        shown = {tuple(s.labels.get(label) for label in metric.labels) for s in family.samples}
        assert not metric.labels or set(known_labels(metric)) == shown
        assert hasattr(metrics, name)
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not name.endswith("_total")
        assert (metric.kind is Kind.HISTOGRAM) == name.endswith("_seconds")


def test_a_miss_and_a_drop_are_told_with_what_to_do(metrics, caplog):
    metrics.job_ended(Direction.SAVE, Reason.STORE_FULL, 0.1, StoreFull("redis://there: OOM"))
    metrics.lookup_ended(64, 0, Reason.STORE_DOWN, StoreUnavailable("redis://there: refused"))
    full, down = (record.getMessage() for record in caplog.records)
    assert "a save fell short (store_full)" in full
    assert "[redis://there: OOM]" in full
    assert "Look at the pool's size" in full
    assert "`" not in full
    assert "a lookup" in down
    assert "refused" in down
    assert "doctor" in down
