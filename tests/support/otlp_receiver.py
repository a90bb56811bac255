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


class OTLPReceiver:
    """Keeps what arrives, in `spans`.

    url: for PDSTORE_TRACES.
    """

    def __init__(self) -> None:
        self.spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                receiver.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _texts(group.resource.attributes)["service.name"]
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans.append(
                    Received(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _texts(span.attributes),
                    )
                )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def receiving() -> Iterator[OTLPReceiver]:
    """Runs a receiver."""
    receiver = OTLPReceiver()
    try:
        yield receiver
    finally:
        receiver.close()


def _texts(attributes: object) -> dict[str, str]:
    return {  # a number as its digits
        each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in attributes
    }
