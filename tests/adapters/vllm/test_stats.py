"""Metrics on their way to vLLM's /metrics: nothing is lost, counted twice, or stale."""

from __future__ import annotations

import multiprocessing
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from pdstore.adapters.vllm.connector import PDStoreConnector
from pdstore.adapters.vllm.stats import GAUGES, PDStorePromMetrics, StepMetrics, stats_of
from pdstore.errors import Direction, Reason

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def metrics():
    return StepMetrics()


def changes(stats):
    """Returns what is no gauge."""
    return {key: change for key, change in stats.data.items() if key != GAUGES}


def page_of(registry):
    """vLLM's metrics of pdstore, with the types that it passes."""
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return PDStorePromMetrics(config, types, list(LABELS), {0: list(LABELS.values())})


def test_what_happened_is_returned_once(metrics):
    metrics.miss(Reason.LOST)
    metrics.tokens.labels("loaded").inc(900)
    assert changes(metrics.pop()) == {"misses|lost": 1, "tokens|loaded": 900}
    metrics.tokens.labels("loaded").inc(1)
    assert changes(metrics.pop()) == {"tokens|loaded": 1}
    assert not changes(metrics.pop())


def test_steps_and_processes_add_up_and_vllms_log_has_counts_and_means(metrics):
    other = StepMetrics()
    for each, seconds in ((metrics, 0.25), (other, 0.75)):
        each.job_ended(Direction.LOAD, None, seconds)
    other.jobs_alive.set(2)
    total = metrics.pop().aggregate(other.pop())
    assert changes(total) == {"jobs|load|ok": 2, "job_seconds|load": [0.25, 0.75]}
    own, others = total.data[GAUGES].values()
    assert (own.get("jobs_alive"), others["jobs_alive"]) == (None, 2)
    assert total.reduce() == {"jobs load ok": 2, "job_seconds load (mean)": 0.5}
    total.reset()
    assert total.is_empty()
    told = PDStoreConnector.build_kv_connector_stats(metrics.pop().data)
    assert told.is_empty()  # gauges alone are no line


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
    shown = page_of(registry)
    metrics.miss(Reason.LOST)
    metrics.job_ended(Direction.SAVE, Reason.STORE_FULL, 0.5)
    metrics.slots_lent.set(3)
    taken = metrics.pop()
    shown.observe(taken.data)
    shown.observe(taken.data)
    value = registry.get_sample_value
    assert value("pdstore_misses_total", {"reason": "lost", **LABELS}) == 2
    outcome = {"direction": "save", "outcome": "store_full", **LABELS}
    assert value("pdstore_jobs_total", outcome) == 2
    assert value("pdstore_drops_total", {"reason": "store_full", **LABELS}) == 2
    assert value("pdstore_job_seconds_sum", {"direction": "save", **LABELS}) == 1.0
    assert value("pdstore_slots_lent", LABELS) == 3
    assert value("pdstore_misses_total", {"reason": "corrupt", **LABELS}) == 0


def test_connectors_of_one_process_are_added_up_and_none_hides_another(metrics):
    """A worker and the scheduler, which may be one process, and several pools beside each other."""
    others = StepMetrics(), StepMetrics()
    registry = CollectorRegistry()
    shown = page_of(registry)

    def seen(name):
        total = metrics.pop().aggregate(others[0].pop()).aggregate(others[1].pop())
        shown.observe(total.data)
        return registry.get_sample_value(name, LABELS)

    metrics.jobs_alive.set(3)
    others[0].jobs_alive.set(2)
    assert seen("pdstore_jobs_alive") == 5
    metrics.jobs_alive.set(0)
    assert seen("pdstore_jobs_alive") == 2
    for each in (metrics, *others):
        each.breaker_open.set(1)
        assert seen("pdstore_breaker_open") == 1
        each.breaker_open.set(0)
        assert seen("pdstore_breaker_open") == 0


def _serve(messages):
    """An API server of several: its metrics go to files of its own."""
    values.ValueClass = values.MultiProcessValue()
    shown = page_of(CollectorRegistry())
    while (message := messages.recv()) is not None:
        shown.observe(message)
        messages.send("shown")


@pytest.fixture
def api_servers(tmp_path, monkeypatch):
    """Two API servers with one page, as with `--api-server-count 2`.

    Returns (observe, value): `observe(n, stats)` hands a step's stats to one of them, and `value`
    returns all values of a metric on the page, with the labels that are not vLLM's.
    """
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")
    pipes, servers = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(theirs,), daemon=True)
        server.start()
        pipes.append(ours)
        servers.append(server)

    def observe(number, stats):
        pipes[number].send(stats.data)
        assert pipes[number].poll(30), "an API server is late"
        assert pipes[number].recv() == "shown"

    def value(name):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        samples = [each for family in registry.collect() for each in family.samples]
        return [
            (each.value, {k: v for k, v in each.labels.items() if k not in LABELS})
            for each in samples
            if each.name == name
        ]

    yield observe, value
    for pipe, server in zip(pipes, servers, strict=True):
        pipe.send(None)
        server.join(30)
        assert server.exitcode == 0


def test_gauges_of_several_api_servers_are_one_series_that_is_never_stale(api_servers, metrics):
    observe, values_of = api_servers
    worker = StepMetrics()
    pool = b"one"
    metrics.set_info(1, "decode", "ab", "redis://there", lambda: pool)

    def step(number):
        observe(number, metrics.pop().aggregate(worker.pop()))

    for first, second in ((0, 1), (1, 0)):
        worker.breaker_open.set(1)
        worker.queue_jobs.labels("load").set(2)
        step(first)
        assert values_of("pdstore_breaker_open") == [(1, {})]
        assert (2, {"direction": "load"}) in values_of("pdstore_queue_jobs")
        worker.breaker_open.set(0)
        worker.queue_jobs.labels("load").set(0)
        for number in (second, first):
            step(number)
            assert values_of("pdstore_breaker_open") == [(0, {})]
            assert (0, {"direction": "load"}) in values_of("pdstore_queue_jobs")
    for number, pool in ((0, b"one"), (1, b"other"), (0, b"other")):
        step(number)
        pools = {labels["pool"]: value for value, labels in values_of("pdstore_info")}
        assert [each for each, value in pools.items() if value] == [pool.hex()]
