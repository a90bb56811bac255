"""An OTLP receiver: takes spans over real HTTP and keeps them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Received:
    """One span; ids in hex, times in nanoseconds since the epoch."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, str]


@dataclass
class OTLPReceiver:
    """A receiver at `url`, for PDSTORE_TRACES, and the spans that it has."""

    url: str
    spans: list[Received]


@contextlib.contextmanager
def receiving() -> Iterator[OTLPReceiver]:
    """Runs a receiver."""
    spans: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            spans.extend(_spans_in(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield OTLPReceiver(f"http://127.0.0.1:{server.server_port}", spans)
        finally:
            server.shutdown()
            thread.join()


def _spans_in(body: bytes) -> Iterator[Received]:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    for group in trace_service_pb2.ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _texts(group.resource.attributes)["service.name"]
        for span in (span for scope in group.scope_spans for span in scope.spans):
            ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
            times = span.start_time_unix_nano, span.end_time_unix_nano
            yield Received(service, span.name, *ids, *times, _texts(span.attributes))


def _texts(attributes: object) -> dict[str, str]:
    return {  # a number as its digits
        each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in attributes
    }
