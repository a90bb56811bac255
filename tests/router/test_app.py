"""The router's process: health, metrics, models, its page, its start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.responses import Response

from pdstore.errors import ConfigError
from pdstore.router.app import Options, make_app
from pdstore.router.counts import FAILURES
from pdstore.router.main import main
from pdstore.router.upstreams import Upstream
from pdstore.status.server import StatusServer
from tests.support.child import child
from tests.support.listeners import addresses_of
from tests.support.router_kit import (
    BODY,
    DEADLINE_S,
    PARAMS,
    Fake,
    listening,
    metric,
    nobody,
    routed,
    says,
    url_of,
)

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.misconfiguration("the router has P's and D's URL swapped")
@pytest.mark.misconfiguration("a proxy before P strips `kv_transfer_params`")
async def test_a_p_that_hands_nothing_over_is_told_with_how_to_find_out_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routed([Fake()], [Fake()]) as client:
        for _ in range(3):
            await client.post("/v1/completions", json=BODY)
    said = "--prefill must be the URL of an instance started with PD_TRANSFER_VIA_STORAGE=1,"
    assert caplog.text.count(f"{said} PDSTORE_ROLE=prefill and PDSTORE_PUBLISH=1") == 1
    assert "Or a proxy or gateway between removes them" in caplog.text


@pytest.mark.misconfiguration("the router has one URL for both")
async def test_one_url_for_p_and_d_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    both = "http://127.0.0.1:8200"
    async with routed([both, "http://127.0.0.1:8100"], [both + "/"]):
        pass
    said = f"{both} is --prefill and --decode: give each the URL of its own instance"
    assert caplog.messages.count(said) == 1


@pytest.mark.misconfiguration("`--served-model-name` differs on P or D")
async def test_a_request_that_d_alone_refuses_is_told_with_the_options_that_may_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = {"error": {"message": "the model 'm' does not exist: this is 'other'"}}
    d = Fake(says(error, 404))
    async with routed([Fake(says({"kv_transfer_params": PARAMS}))], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()) == (404, error)
    assert "decode http://127.0.0.1:" in caplog.text
    assert "which goes to the client; if P took the request, give P and D the same" in caplog.text
    assert "--served-model-name and --max-model-len" in caplog.text
    assert "HTTP 404: the model 'm' does not exist: this is 'other'" in caplog.text


@pytest.mark.misconfiguration("`--served-model-name` differs on P or D")
async def test_a_request_that_p_alone_refuses_is_told_with_the_instance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = {"error": {"message": "the model 'm' does not exist:\nthis is 'other'"}}
    async with routed([Fake(says(error, 404))], [Fake()]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()) == (404, error)
    assert "prefill http://127.0.0.1:" in caplog.text
    assert "HTTP 404: the model 'm' does not exist:?this is 'other', which goes to" in caplog.text
    assert "if D took the request, give P and D the same --served-model-name" in caplog.text


@pytest.mark.misconfiguration("a load balancer before P or D ends requests by its own timeout")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_load_balancer_answers_is_told_as_such(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def page(body: dict[str, Any]) -> Response:
        return Response("<html>Gateway Timeout</html>", 504, media_type="text/html")

    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake()
    ({"prefill": p, "decode": d}[role]).reply = page
    async with routed([p], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
        failures = f'router_upstream_failures_total{{reason="status",role="{role}"'
        assert await metric(client, failures) == 1
    assert answer.status_code == (504 if role == "decode" else 200)
    assert "HTTP 504: not in an engine's form, so a proxy or load balancer before it" in caplog.text


@pytest.mark.misconfiguration("a redirect, as from http to https")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_redirect_is_told_and_no_answer_of_p(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake()
    ({"prefill": p, "decode": d}[role]).reply = says({}, 308)
    async with routed([p], [d]) as client:
        await client.post("/v1/completions", json=BODY)
    assert "HTTP 308: a redirect, which is not followed: write the URL of the" in caplog.text
    assert "without kv_transfer_params" not in caplog.text


@pytest.mark.misconfiguration("a status port as the router's URL")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_status_port_is_told_to_be_none_of_an_api(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    page = StatusServer(0, dict)
    wrong: list[Fake | str] = [page.url]
    p, d = (wrong, [Fake()]) if role == "prefill" else ([Fake()], wrong)
    said = (
        "this is pdstore's status page: requests, /health and /metrics are at the port of the API"
    )
    async with routed(p, d) as client:
        answer = await client.post("/v1/completions", json=BODY)
        health = (await client.get("/health")).json()
    await anyio.to_thread.run_sync(page.close)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, said)
    assert health["reasons"] == [f"{role} {page.url}: HTTP 404: {said}"]
    assert f"{role} {page.url}: HTTP 404: {said}" in caplog.text


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


async def page_with_a_request(log: str) -> dict:
    """Returns the status page once it shows the request, whose answer is there a moment before."""
    [url] = re.findall(r"status on (\S+)", log)
    async with httpx.AsyncClient(trust_env=False) as client:
        while not (page := (await client.get(f"{url}/pdstore")).json())["requests"]:
            await anyio.sleep(0.01)
    return page


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
async def test_requests_show_the_time_of_p_of_d_and_of_the_answer(caplog, mode: str) -> None:
    caplog.set_level(logging.INFO)
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(says({"id": "d"}))
    async with routed([p], [d], mode=mode, status_port=0) as client:
        await client.post("/v1/completions", json=BODY, headers={"x-request-id": "r-7"})
        page = await page_with_a_request(caplog.text)
    [one] = page["requests"]
    assert (one["request_id"], one["reason"]) == ("r-7", None)
    assert one["handoff"] == d.bodies[0]["kv_transfer_params"]["pdstore"]["attempt"]
    assert {phase["name"] for phase in one["phases"]} == {"prefill", "decode", "answer"}
    assert page["cards"]["answers"] == 1
    origins = {each["name"]: each["origin"] for each in page["settings"]}
    assert (origins["status_port"], origins["body_bytes"]) == ("argument", "default")
    assert page["problem"] is None


async def test_a_request_that_d_had_to_compute_has_its_reason(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with routed([Fake(says({}, 503))], [Fake()], status_port=0) as client:
        await client.post("/v1/completions", json=BODY)
        page = await page_with_a_request(caplog.text)
    assert [each["reason"] for each in page["requests"]] == ["no P could prefill it"]
    assert list(page["reasons"]) == ["prefill: status"]
    recent = {curve["name"]: curve["recent"] for curve in page["curves"]}
    assert recent["computed by D for want of P"] == 1.0
    assert recent["failed calls/s"] > 0.0


async def test_a_path_that_is_not_served_is_told_with_those_that_are() -> None:
    async with routed([], [Fake()]) as client:
        answer = await client.post("/v1/responses", json=BODY)
    assert answer.status_code == 404
    said = answer.json()["error"]["message"]
    assert "POST /v1/responses; this router serves /v1/completions and /v1/chat/completions" in said


@pytest.mark.misconfiguration("a port that is taken")
async def test_a_port_that_is_taken_is_named() -> None:
    taken = StatusServer(0, dict)
    port = int(taken.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        make_app(Options(("http://p",), ("http://d",), status_port=port))
    taken.close()


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yields the process, with what it says by then read, and its port."""
    with listening() as sock, nobody() as gone:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "pdstore.router", "--prefill", gone, "--decode", gone]
    with child(
        [*command, "--port", str(port), *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = ""
        while "running on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, port


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_is_there_for_this_host_alone_and_stops_cleanly(
    stop: signal.Signals,
) -> None:
    with started() as (process, port):
        assert addresses_of(port) == ["127.0.0.1"]
        process.send_signal(stop)
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in rest
    assert process.returncode == 0


@pytest.mark.misconfiguration("the router's URLs end in `/v1`")
@pytest.mark.parametrize("option", ["--prefill", "--decode"])
@pytest.mark.parametrize("ending", ["/v1", "/v1/", "/v1/completions"])
def test_a_url_with_v1_is_refused_with_the_one_to_write(
    option: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:8100{ending}"
    with pytest.raises(SystemExit):
        main(["--prefill", "http://p", "--decode", "http://d", option, url])
    said = f"argument {option}: {url}: write http://127.0.0.1:8100, the router adds /v1 itself"
    assert said in capsys.readouterr().err


@pytest.mark.misconfiguration("several URLs in one option")
@pytest.mark.parametrize("given", ["http://d1,http://d2", "http://d1:1,http://d2:2", "http://a b"])
def test_several_urls_in_one_option_are_refused_with_what_to_write(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--prefill", "http://p", "--decode", given])
    said = f"{given!r} is not one URL: give the option once for each: --decode http://d1 --decode"
    assert said in capsys.readouterr().err


def test_p_s_first_token_needs_d_to_be_asked_behind_p(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prefill", "http://p", "--decode", "http://d", "--mode", "concurrent"]
    with pytest.raises(SystemExit):
        main([*options, "--first-token", "prefill"])
    assert "needs --mode relay" in capsys.readouterr().err


@pytest.mark.parametrize("p", ["gone", "HTTP 500", "breaks off", "hands nothing over"])
@pytest.mark.parametrize("d", ["gone", "HTTP 504", "HTTP 404", "breaks off"])
async def test_what_fails_each_request_is_logged_once_in_a_while(
    p: str, d: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})

    async def breaks_off(body: dict[str, Any]) -> Any:
        return half

    def instance(how: str, gone: str) -> Fake | str:
        if how == "gone":
            return gone
        if how == "breaks off":
            return Fake(breaks_off)
        return Fake(says({}, int(how[-3:]) if "HTTP" in how else 200))

    with nobody() as gone:
        async with routed([instance(p, gone)], [instance(d, gone)]) as client:
            for _ in range(4):
                with contextlib.suppress(httpx.RemoteProtocolError):
                    await client.post("/v1/completions", json=BODY)
    lines = [each.getMessage() for each in caplog.records if each.name == "router"]
    assert 2 <= len(lines) <= 4


async def test_the_page_tells_degraded_apart_from_its_reasons(caplog) -> None:
    """The page writes the status before the problem."""
    caplog.set_level(logging.INFO)
    with nobody() as gone:
        async with routed([gone], [Fake()], status_port=0) as client:
            health = (await client.get("/health")).json()
            await client.post("/v1/completions", json=BODY)
            page = await page_with_a_request(caplog.text)
    assert (page["status"], page["problem"]) == ("degraded", health["reasons"][0])
    assert page["problem"].startswith(f"prefill {gone}: cannot be reached")


@pytest.mark.parametrize("kept_s", [1, 30])
async def test_an_idle_clients_connection_is_kept_as_long_as_the_option_says(kept_s: int) -> None:
    with started("--keep-alive", str(kept_s)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"router_first_byte_seconds_created")
        wait_s = 0.5 if kept_s == 30 else DEADLINE_S
        with anyio.move_on_after(wait_s) as waited:
            while await reader.read(1 << 16):
                pass
        assert waited.cancelled_caught == (kept_s == 30)
        writer.close()


async def test_an_instance_that_speaks_http_behind_https_is_told_with_what_to_write(caplog) -> None:
    """So it is in /health, and in the log of a request that met it."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listening())
        threading.Thread(target=_answer_in_plain_text, args=[sock], daemon=True).start()
        plain = url_of(sock)
        async with routed([plain.replace("http", "https")], [Fake()]) as client:
            [reason] = (await client.get("/health")).json()["reasons"]
            await client.post("/v1/completions", json=BODY)
    assert reason.endswith(f": it speaks http: write {plain}")
    assert caplog.text.count(f": it speaks http: write {plain}") == 1


def _answer_in_plain_text(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the test has ended
        while True:
            with contextlib.closing(sock.accept()[0]) as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("url", "said", "hint"),
    [
        ("http://10.0.0.9:8100", "All connection attempts failed", "--host 0.0.0.0"),
        ("http://127.0.0.1:8100", "All connection attempts failed", ""),
        ("http://10.0.0.9:8100", "[Errno -2] Name or service not known", ""),
        ("https://10.0.0.9:8100", "[SSL: WRONG_VERSION_NUMBER]", "write http://10.0.0.9:8100"),
    ],
)
def test_the_way_to_an_instance_is_told_where_the_error_shows_it(url, said, hint) -> None:
    told = Upstream(url, "prefill").way_to(said)
    assert hint in told
    assert bool(hint) is bool(told)
