"""Lines, pages, traces and metrics of vLLM's instances."""

from __future__ import annotations

import importlib.metadata
import json
import re
from typing import Any

import httpx
import pytest

from pdstore.adapters.vllm.stats import StepMetrics
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


@pytest.mark.misconfiguration("P and D run two supported versions of vLLM")
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
    "compute_seconds_per_token": "no prompt here has 512 tokens to compute",
    **{name: "this pool has one store" for name in METRICS if name.startswith("tier_")},
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
