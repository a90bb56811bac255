"""The router's page: the last requests with P's and D's time, and which instance is away."""

from __future__ import annotations

import logging
import re

import anyio
import httpx
import pytest

from examples.router.app import Options, make_app
from pdstore.errors import ConfigError
from pdstore.status.server import StatusServer
from tests.support.router_kit import BODY, PARAMS, Fake, routed, says

pytestmark = pytest.mark.anyio


def page_in(log: str) -> str:
    return re.findall(r"status on (\S+)", log)[-1]


async def taken_from(url: str) -> dict:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}/pdstore")).json()


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
async def test_requests_show_the_time_of_p_of_d_and_of_the_answer(caplog, mode: str) -> None:
    caplog.set_level(logging.INFO)
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(says({"id": "d"}))
    async with routed([p], [d], mode=mode, status_port=0) as client:
        await client.post("/v1/completions", json=BODY, headers={"x-request-id": "r-7"})
        while not (page := await taken_from(page_in(caplog.text)))["requests"]:
            await anyio.sleep(0.01)  # the answer is there a moment before
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
        while not (page := await taken_from(page_in(caplog.text)))["requests"]:
            await anyio.sleep(0.01)  # the answer is there a moment before
    assert [each["reason"] for each in page["requests"]] == ["no P could prefill it"]
    assert list(page["reasons"]) == ["prefill: status"]


async def test_a_port_that_is_taken_is_named() -> None:
    taken = StatusServer(0, dict)
    port = int(taken.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        make_app(Options(("http://p",), ("http://d",), status_port=port))
    taken.close()
