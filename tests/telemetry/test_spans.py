"""Spans: a record becomes a request's span with its phases; without the setting nothing loads."""

from __future__ import annotations

import contextlib
import dataclasses
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdstore.errors import MissingExtra
from pdstore.telemetry.request_record import Phase
from pdstore.telemetry.spans import Spans
from pdstore.testing.values import start_background
from tests.support.otlp_receiver import receiving
from tests.telemetry.test_request_record import RECORD

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = dataclasses.replace(
    RECORD, in_store=(Phase("load", 0.3, 0.4),), traceparent=f"00-{TRACE}-{PARENT}-01"
)


@pytest.fixture
def made():
    """Adds records; returns their spans by name."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider)

    def add(record):
        exporter.clear()
        spans.add(record)
        return {span.name: span for span in exporter.get_finished_spans()}

    yield add
    spans.close()


def test_a_request_is_a_span_of_its_clients_trace_with_one_for_each_phase(made):
    found = made(TRACED)
    request, load, store = (found[f"pdstore.{n}"] for n in ("request", "load", "store"))
    assert {format(span.context.trace_id, "032x") for span in found.values()} == {TRACE}
    assert format(request.parent.span_id, "016x") == PARENT
    assert (load.parent.span_id, store.parent.span_id) == (
        request.context.span_id,
        load.context.span_id,
    )
    assert found["pdstore.wait"].parent.span_id == request.context.span_id
    assert [(s.start_time, s.end_time) for s in (request, load, store)] == [
        (1000_000_000_000, 1000_500_000_000),
        (1000_250_000_000, 1000_500_000_000),
        (1000_300_000_000, 1000_400_000_000),
    ]


def test_spans_go_to_the_receiver_when_an_instance_ends():
    with receiving() as receiver:
        spans = Spans.to(receiver.url, "decode", namespace="ab" * 16, store="memory://x")
        spans.add(TRACED)
        spans.close()
    assert {span.service for span in receiver.spans} == {"pdstore-decode"}
    assert len(receiver.spans) == 4


def test_a_receiver_that_is_away_costs_a_stop_some_seconds_at_most():
    with receiving() as receiver:
        away = receiver.url
    spans = Spans.to(away, "decode", namespace="ab" * 16, store="memory://x")
    spans.add(TRACED)
    begin = time.monotonic()
    spans.close()
    assert time.monotonic() - begin < 30


@pytest.mark.misconfiguration("`PDSTORE_TRACES` names no OTLP receiver")
@pytest.mark.parametrize("kind", ["away", "an API", "gRPC"])
def test_a_wrong_receiver_is_one_line_with_the_settings_name(caplog, kind):
    with wrong_receiver(kind) as (url, words):
        spans = Spans.to(url.replace("//", "//me:secret@"), "decode", namespace="", store="")
        spans.add(TRACED)
        spans.close()
    [said] = [r.getMessage() for r in caplog.records if r.name == "pdstore.telemetry.spans"]
    assert said.startswith(f"PDSTORE_TRACES={url}: spans are lost: {words}")
    assert "name an OTLP receiver's URL for HTTP" in said


@contextlib.contextmanager
def wrong_receiver(kind):
    """Yields the URL of what is no receiver, and the words about it."""

    class Api(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_error(404)

        def log_message(self, *args):
            pass

    class OtherProtocol(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            self.request.sendall(bytes(9) + b"\r\n")

    handler = OtherProtocol if kind == "gRPC" else Api
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        end = start_background(server.serve_forever)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        if kind != "away":
            words = "does not speak HTTP" if kind == "gRPC" else "is no OTLP receiver (HTTP 404)"
            yield url, f"what answers there {words}"
        server.shutdown()
        end(10.0)
    if kind == "away":
        yield url, "nothing answers there (Connection refused)"


@pytest.mark.misconfiguration("an extra is not installed")
def test_without_the_extra_the_error_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[otel\]'"):
        Spans.to("http://127.0.0.1:4318", "decode", namespace="", store="")


def test_nothing_of_it_is_loaded_without_the_setting():
    code = (
        "import sys, pdstore; pdstore.KVPool; import pdstore.status.server;"
        "import examples.mini_engine.adapter, pdstore.router.app;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
