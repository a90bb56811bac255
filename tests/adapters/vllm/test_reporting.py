"""Lines, pages, traces and metrics of vLLM's instances."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from pdstore.adapters.vllm.stats import PDStorePromMetrics, StepMetrics, stats_of
from pdstore.errors import Direction, Reason
from pdstore.metrics import METRICS, Kind
from tests.adapters.vllm.asking import ANSWER_S, ask, counted, new_prompt, prefill
from tests.adapters.vllm.test_store_faults import restart
from tests.support.kv import eventually
from tests.support.redis_gate import SAVE

LONG = 300
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECONDS = r"[\d.]+ s"


def handed_over(pair) -> str:
    """Hands a prompt over; returns the hand-off's id."""
    prompt = new_prompt(LONG)
    params = prefill(pair.p, prompt)
    ask(pair.d, prompt, kv_transfer_params=params)
    return params["pdstore"]["attempt"]


def line_of(server, handoff: str) -> str:
    """The one line of a server's log about a hand-off, once it is there."""

    def lines() -> list[str]:
        text = server.log.read_text()
        return [line for line in text.splitlines() if f"hand-off {handoff}, " in line]

    eventually(lines, ANSWER_S)
    [line] = lines()
    return line


def page_of(server) -> str:
    return re.findall(r"status on (http://\S+)", server.log.read_text())[-1]


def test_an_instance_tries_a_block_of_its_own_layout_before_it_serves(pair):
    for server in (pair.p, pair.d):
        before, said, _ = server.log.read_text().partition("Application startup complete")
        assert said
        assert "bytes came back byte for byte" in before


def test_two_versions_of_vllm_share_blocks_unless_a_field_of_their_kv_differs(pair):
    p, d = (
        httpx.get(f"{page_of(server)}/pdstore", trust_env=False).json()["namespace"]
        for server in (pair.p, pair.d)
    )
    assert p == d
    version = importlib.metadata.version("vllm").partition("+")[0]
    assert p["fields"]["layers"]
    assert version not in json.dumps(p["fields"])


def test_each_request_is_one_line_on_p_and_one_on_d(pair):
    handoff = handed_over(pair)
    name = f"request cmpl-.*: hand-off {handoff}, {LONG} tokens"
    counts = rf"\(0 matched, 0 loaded, {LONG} computed, {LONG} saved\)"
    times = f"wait {SECONDS}, compute {SECONDS}, save {SECONDS}"
    assert re.search(f"{name} {counts}; {times}", line_of(pair.p, handoff))
    counts = rf"\({LONG} matched, {LONG - 1} loaded, 1 computed, 0 saved\)"
    times = f"wait {SECONDS}, load {SECONDS}, compute {SECONDS}"
    assert re.search(f"{name} {counts}; {times}", line_of(pair.d, handoff))


def test_the_page_of_an_instance_has_its_requests_and_the_numbers_of_its_workers(pair):
    handoff = handed_over(pair)
    line_of(pair.d, handoff)
    page = httpx.get(f"{page_of(pair.d)}/pdstore", trust_env=False).json()
    [request] = [one for one in page["requests"] if one["handoff"] == handoff]
    assert (request["num_loaded"], request["reason"]) == (LONG - 1, None)
    assert page["role"] == "decode"
    assert page["metrics"]["tokens_total|loaded"] >= LONG
    assert page["metrics"]["slots"] > 0
    assert page["problem"] is None


def test_p_the_store_and_d_are_in_the_trace_of_the_request(pair):
    prompt, headers = new_prompt(LONG), {"traceparent": f"00-{TRACE}-{PARENT}-01"}

    def posted(server, **more) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=ANSWER_S, trust_env=False)
        return answer.json()

    answer = posted(pair.p, kv_transfer_params={"do_remote_decode": True})
    posted(pair.d, kv_transfer_params=answer["kv_transfer_params"])

    def requests() -> list[Any]:
        spans = pair.receiver.spans
        return [s for s in spans if s.name == "pdstore.request" and s.trace == TRACE]

    eventually(lambda: len(requests()) == 2, ANSWER_S)
    by_service = {span.service: span for span in requests()}
    assert {span.parent for span in requests()} == {PARENT}
    for service, moved in (("pdstore-prefill", "save"), ("pdstore-decode", "load")):
        parts = [s for s in pair.receiver.spans if s.parent == by_service[service].id]
        [part] = [s for s in parts if s.name == f"pdstore.{moved}"]
        [store] = [s for s in pair.receiver.spans if s.parent == part.id]
        assert part.begin <= store.begin <= store.end <= part.end


NEVER = {
    "store_codes": "redis has no codes of its own",
    "store_evictions": "redis tells of none that it made for want of room here",
    "store_capacity_bytes": "this redis has no maxmemory",
    "decisions": "nothing is decided where all is loaded",
    "hung_store_calls": "the gate holds the connection, which is closed at its time",
}
"""Metrics that this pair does not move, whatever is done to it."""


def test_no_metric_is_dead(pair):
    """P or D moves every metric: in a hand-off, while saves are held, and without the store."""
    most: dict[str, float] = {}

    def scrape() -> None:
        for server in (pair.p, pair.d):
            for key, value in counted(server).items():
                name = key.partition(":")[0]
                most[name] = max(most.get(name, 0.0), value)

    def is_seen(*names: str) -> bool:
        scrape()
        return all(most.get(f"pdstore_{name}") for name in names)

    ask(pair.d, new_prompt(LONG), 1)
    eventually(lambda: handed_over(pair) and is_seen("handoff_wait_seconds_count"), ANSWER_S)
    pair.p_gate.hold(SAVE)
    for _ in range(4):
        prefill(pair.p, new_prompt(LONG))
    eventually(lambda: is_seen("jobs_alive", "slots_lent", "queue_jobs", "queue_bytes"), ANSWER_S)
    pair.p_gate.release()
    pair.redis.stop()
    for _ in range(4):
        ask(pair.d, new_prompt(LONG), 1)
        prefill(pair.p, new_prompt(LONG))
        scrape()
    restart(pair)
    wanted = {shown(metric) for name, metric in METRICS.items() if name not in NEVER}
    dead = {name for name in wanted if not most.get(name)}
    assert not dead


def shown(metric) -> str:
    return metric.shown_name + ("_count" if metric.kind is Kind.HISTOGRAM else "")


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
