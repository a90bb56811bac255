"""traced: the router's spans, made by OpenTelemetry's instrumentation of ASGI and httpx."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from starlette.types import ASGIApp

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def traced(app: ASGIApp, client: httpx.AsyncClient, provider: TracerProvider) -> ASGIApp:
    """Returns the application with a span for each request, and one for each call by the client.

    A request's span continues the client's trace; the spans of P and D continue their calls'.
    """
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

    HTTPXClientInstrumentor.instrument_client(client, tracer_provider=provider)
    return OpenTelemetryMiddleware(
        app,
        excluded_urls="/health,/metrics,/pdstore",
        tracer_provider=provider,
        exclude_spans=["receive", "send"],
    )
