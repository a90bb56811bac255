"""One trace: from a client's through the router, P, the store and D, at a real receiver."""

from __future__ import annotations

import pytest

from pdstore.telemetry.spans import open_provider
from tests.examples.test_mini_server import Serving
from tests.support.mini_engine_kit import pd_of, prompt_of
from tests.support.otlp_receiver import receiving
from tests.support.router_kit import routed

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = {"prefill": {"wait", "compute", "save"}, "decode": {"wait", "load", "compute"}}

pytestmark = pytest.mark.anyio


def children_of(span, spans):
    return {each.name: each for each in spans if each.parent == span.id}


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
async def test_a_request_is_one_trace_through_the_router_p_the_store_and_d(
    checkpoints, tmp_path, mode
):
    with receiving() as receiver:
        p, d = (
            Serving(checkpoints["llama"], pd_of(role, f"file://{tmp_path}", traces=receiver.url))
            for role in PHASES
        )
        provider = open_provider(receiver.url, "pdstore-router")
        async with routed([p.url], [d.url], provider=provider, mode=mode) as client:
            body = {"prompt": prompt_of(100), "max_tokens": 2}
            headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["usage"]["pdstore"]["loaded_tokens"] == 99
        for one in (p, d):
            one.close()
    assert {span.trace for span in receiver.spans} == {TRACE}
    [whole] = [span for span in receiver.spans if span.parent == CLIENT]
    assert whole.service == "pdstore-router"
    calls = [span for span in receiver.spans if span.parent == whole.id]
    requests = {
        span.service: span for call in calls for span in children_of(call, receiver.spans).values()
    }
    assert set(requests) == {"pdstore-prefill", "pdstore-decode"}
    for role, phases in PHASES.items():
        request = requests[f"pdstore-{role}"]
        parts = children_of(request, receiver.spans)
        assert set(parts) == {f"pdstore.{phase}" for phase in phases}
        moved = parts.get("pdstore.save") or parts["pdstore.load"]
        [store] = children_of(moved, receiver.spans).values()
        assert store.name == "pdstore.store"
        assert request.begin <= moved.begin <= store.begin <= store.end <= moved.end <= request.end
    assert requests["pdstore-decode"].attributes["pdstore.num_loaded"] == "99"
