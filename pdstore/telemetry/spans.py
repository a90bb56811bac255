"""Spans: sends the records of requests as OpenTelemetry spans, in the requests' own traces."""

from __future__ import annotations

import http.client
import logging
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from pdstore.errors import MissingExtra
from pdstore.telemetry.request_record import Phase, RequestRecord
from pdstore.threads import Deadline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_PATH = "/v1/traces"  # OTLP's path, for a receiver's URL without a path
_EXPORT_TIMEOUT_S = 3.0  # the longest that a stop waits for a receiver that does not answer
_WARNING_INTERVAL_S = 3600.0  # between two warnings that spans are not received
_NS = 1_000_000_000
_NO_RECEIVER = (404, 405, 501)  # others, as 401, may be a receiver's
REMEDY = "name an OTLP receiver's URL for HTTP, like http://HOST:4318, or leave it out"
"""Advice for a PDSTORE_TRACES that names no receiver."""

log = logging.getLogger(__name__)


def endpoint_of(url: str) -> str:
    """Returns the URL to which spans are posted, for a value of PDSTORE_TRACES."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else url


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def why_not_received(url: str, timeout_s: float) -> str | None:
    """Returns why no OTLP receiver takes spans at PDSTORE_TRACES; None if one may.

    Posts an empty request, which makes no span.

    timeout_s: how long to wait for the connection, and for each part of the answer.
    """
    kind = {"Content-Type": "application/x-protobuf"}
    try:
        address = _without_user(endpoint_of(url))  # urllib knows no user in a URL
        request = urllib.request.Request(address, b"", kind, method="POST")
        urllib.request.urlopen(request, timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        error.close()
        is_other = error.code in _NO_RECEIVER
        return f"what answers there is no OTLP receiver (HTTP {error.code})" if is_other else None
    except (http.client.HTTPException, ConnectionResetError):
        return "what answers there does not speak HTTP (4317 is OTLP's port for gRPC)"
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)  # an URLError's own text is `<urlopen error ...>`
        if isinstance(why, ssl.SSLCertVerificationError):
            return None  # the SDK may know its authority
        if "WRONG_VERSION_NUMBER" in str(why):
            return "what answers there speaks no TLS: write http://"
        return f"nothing answers there ({getattr(why, 'strerror', None) or why})"
    return None


def _telling_exporter(url: str, setting: str) -> SpanExporter:
    """Returns the SDK's exporter, which also logs, once an hour, why spans are lost."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Telling(OTLPSpanExporter):
        """Names the setting, which the SDK's own lines do not."""

        _silent_until = Deadline(0.0)

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            if result is SpanExportResult.FAILURE and self._silent_until.is_over():
                self._silent_until = Deadline(_WARNING_INTERVAL_S)
                why = why_not_received(url, _EXPORT_TIMEOUT_S) or "the receiver did not take them"
                shown = _without_user(url).partition("?")[0]
                log.warning("%s=%s: spans are lost: %s: %s", setting, shown, why, REMEDY)
            return result

    return Telling(endpoint=endpoint_of(url), timeout=_EXPORT_TIMEOUT_S)


def open_provider(
    url: str, service: str, setting: str = "PDSTORE_TRACES", **resource: str
) -> TracerProvider:
    """Returns a provider whose spans go to an OTLP receiver, in batches, over HTTP.

    The SDK's own thread sends the spans. If the receiver does not answer, only spans are lost.

    url: PDSTORE_TRACES.
    service: the name of this process in spans, unless OTEL_SERVICE_NAME gives one.
    setting: the name of the setting that has the URL, for the log.
    resource: further attributes of every span.
    Raises MissingExtra.
    """
    try:
        exporter = _telling_exporter(url, setting)
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"traces need a package that is not installed ({error.name}):"
            " pip install 'pdstore[otel]'"
        ) from error

    class SpanIds(IdGenerator):
        """Draws ids from the system's randomness.

        The SDK's own generator uses Python's `random`. vLLM seeds `random` in each process, with
        the same seed on P and D: their spans would have the same ids.
        """

        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1  # 0 is no id

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    attributes = Resource.create({"service.name": service, **resource})
    provider = TracerProvider(
        resource=attributes.merge(OTELResourceDetector().detect()),
        id_generator=SpanIds(),
        shutdown_on_exit=False,  # `Spans.close` does it
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Spans:
    """Makes the spans of requests that have ended: give `add` to `Journal.listen`.

    Each request has one span, which contains a span for each phase. A phase's span contains one
    for the store, from the begin of the phase's first store call to the end of its last. All spans
    of a request belong to the trace in the record's `traceparent`, or else to a new trace. Any
    thread may call it.

    provider: the SDK's object that sends the spans; `close` closes it.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pdstore")
        self._traces = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, url: str, role: str, *, namespace: str, store: str) -> Spans:
        """Opens the spans of an instance. Raises MissingExtra.

        url: the URL of an OTLP receiver. role: PDSTORE_ROLE. store: the store's label.
        """
        named = {"pdstore.role": role, "pdstore.namespace": namespace, "pdstore.store": store}
        return cls(open_provider(url, f"pdstore-{role}", **named))

    def add(self, record: RequestRecord) -> None:
        """Makes the spans of one request."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        headers = {"traceparent": record.traceparent} if record.traceparent else {}
        whole = self._tracer.start_span(
            "pdstore.request",
            context=self._traces.extract(headers, context=Context()),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=_instant(record, 0.0),
        )
        for phase in record.phases:
            span = self._begin(whole, f"pdstore.{phase.name}", record, phase)
            for part in record.in_store:
                if part.name == phase.name:
                    inner = self._begin(span, "pdstore.store", record, part)
                    inner.end(_instant(record, part.end_s))
            span.end(_instant(record, phase.end_s))
        last = max((phase.end_s for phase in record.phases), default=0.0)
        whole.end(_instant(record, last))

    def close(self) -> None:
        """Sends the remaining spans; gives up after a few seconds."""
        self._provider.shutdown()

    def _begin(self, parent: Span, name: str, record: RequestRecord, phase: Phase) -> Span:
        from opentelemetry.trace import set_span_in_context

        begin = _instant(record, phase.begin_s)
        return self._tracer.start_span(name, set_span_in_context(parent), start_time=begin)


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    numbers = ("num_tokens", "num_matched", "num_loaded", "num_computed", "num_saved")
    attributes = {"request_id": record.request_id, "handoff": record.handoff, "role": record.role}
    attributes["reason"] = record.reason.value if record.reason else None
    found: dict[str, str | int] = {f"pdstore.{name}": getattr(record, name) for name in numbers}
    return found | {
        f"pdstore.{name}": text for name, text in attributes.items() if text is not None
    }


def _instant(record: RequestRecord, seconds: float) -> int:
    """Returns the time `seconds` after the request's arrival, as nanoseconds since the epoch."""
    return int((record.arrived_at + seconds) * _NS)
