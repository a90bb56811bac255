"""One trace: from a client's through the router, P, the store and D, at a real receiver."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
import uvicorn

from examples.router.app import Options, make_app
from pdstore.telemetry.spans import open_provider
from tests.examples.test_mini_server import Serving
from tests.support.mini_engine_kit import DEADLINE_S, prompt_of, until
from tests.support.otlp_receiver import receiving

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Router:
    """The router behind real HTTP, in a thread; its end sends its last spans."""

    def __init__(self, options, provider):
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(make_app(options, provider), log_config=None))
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()
        until(lambda: self._server.started)

    def close(self):
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)


def children_of(span, spans):
    return {each.name: each for each in spans if each.parent == span.id}


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
def test_a_request_is_one_trace_through_the_router_p_the_store_and_d(checkpoints, tmp_path, mode):
    with receiving() as receiver:
        pd = {"pd_transfer_via_storage": True, "store": f"file://{tmp_path}", "staging": "8MiB"}
        pd |= {"traces": receiver.url}
        p, d = (
            Serving(checkpoints["llama"], pd | {"role": role}) for role in ("prefill", "decode")
        )
        urls = [(str(one.client.base_url).rstrip("/"),) for one in (p, d)]
        router = Router(Options(*urls, mode=mode), open_provider(receiver.url, "pdstore-router"))
        body = {"prompt": prompt_of(100), "max_tokens": 2}
        headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
        answer = httpx.post(
            f"{router.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S
        )
        assert answer.json()["usage"]["pdstore"]["loaded_tokens"] == 99
        for one in (router, p, d):
            one.close()
    assert {span.trace for span in receiver.spans} == {TRACE}
    [whole] = [span for span in receiver.spans if span.parent == CLIENT]
    assert whole.service == "pdstore-router"
    calls = [s for s in receiver.spans if s.parent == whole.id]
    requests = {
        span.service: (span, children_of(span, receiver.spans))
        for call in calls
        for span in children_of(call, receiver.spans).values()
    }
    assert set(requests) == {"pdstore-prefill", "pdstore-decode"}
    for service, phases in (
        ("pdstore-prefill", {"wait", "compute", "save"}),
        ("pdstore-decode", {"wait", "load", "compute"}),
    ):
        request, parts = requests[service]
        assert set(parts) == {f"pdstore.{phase}" for phase in phases}
        moved = parts["pdstore.save" if service == "pdstore-prefill" else "pdstore.load"]
        [store] = children_of(moved, receiver.spans).values()
        assert store.name == "pdstore.store"
        assert request.begin <= moved.begin <= store.begin <= store.end <= moved.end <= request.end
    assert requests["pdstore-decode"][0].attributes["pdstore.num_loaded"] == "99"
