"""The router's other endpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.router.counts import FAILURES
from tests.support.router_kit import (
    BODY,
    PARAMS,
    Fake,
    metric,
    nobody,
    routed,
    says,
)

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[3]


async def test_health_tells_the_state_of_every_instance() -> None:
    with nobody() as gone:
        async with routed([Fake()], [Fake()]) as client:
            fine = await client.get("/health")
        async with routed([gone], [Fake(), gone]) as client:
            without_p = await client.get("/health")
        async with routed([Fake()], [gone]) as client:
            without_d = await client.get("/health")
    assert (fine.status_code, fine.json()["status"]) == (200, "ok")
    assert (without_p.status_code, without_p.json()["status"]) == (200, "degraded")
    assert [u["ok"] for u in without_p.json()["upstreams"]] == [False, True, False]
    assert (without_d.status_code, without_d.json()["status"]) == (503, "down")


async def test_a_p_that_hands_nothing_over_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with routed([Fake()], [Fake()]) as client:
        for _ in range(3):
            await client.post("/v1/completions", json=BODY)
    said = "--prefill must be the URL of an instance started with PD_TRANSFER_VIA_STORAGE=1,"
    assert caplog.text.count(f"{said} PDSTORE_ROLE=prefill and PDSTORE_PUBLISH=1") == 1


async def test_one_url_for_p_and_d_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    both = "http://127.0.0.1:8200"
    async with routed([both, "http://127.0.0.1:8100"], [both + "/"]):
        pass
    said = f"{both} is --prefill and --decode: give each the URL of its own instance"
    assert caplog.messages.count(said) == 1


async def test_a_request_that_d_alone_refuses_is_told_with_the_options_that_may_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = {"error": {"message": "the model 'm' does not exist: this is 'other'"}}
    d = Fake(says(error, 404))
    async with routed([Fake(says({"kv_transfer_params": PARAMS}))], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()) == (404, error)
    assert "decode http://127.0.0.1:" in caplog.text
    assert "HTTP 404, which goes to the client; if P took the request, give P and D the same" in (
        caplog.text
    )
    assert "--served-model-name and --max-model-len" in caplog.text


async def test_every_metric_of_the_page_is_there_from_the_start_with_0() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Of the router")[2]
    named = set(re.findall(r"^\| `(router_\w+)`", page, re.MULTILINE))
    async with routed([Fake()], [Fake()]) as client:
        text = (await client.get("/metrics")).text
    samples = [line.split() for line in text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in samples if "_created" not in name}
    assert set(values.values()) == {0.0}
    for name in named:
        assert any(re.match(rf"{name}(_count)?(\{{|$)", each) for each in values), name
    for role in ("prefill", "decode"):
        for reason in FAILURES:
            assert f'router_upstream_failures_total{{reason="{reason}",role="{role}"}}' in values


async def test_every_answer_is_counted_but_those_of_probes() -> None:
    async with routed([Fake()], [Fake()]) as client:
        for path in ("/health", "/metrics", "/v1/models"):
            await client.get(path)
        assert (await client.get("/v1/completions")).status_code == 405
        assert await metric(client, 'router_requests_total{status="200"}') == 1
        assert await metric(client, 'router_requests_total{status="405"}') == 1
