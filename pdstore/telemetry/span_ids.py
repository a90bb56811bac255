"""SpanIds: ids of spans and traces that no seed repeats."""

from __future__ import annotations

import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SpanIds(IdGenerator):
    """Draws ids from the system's randomness.

    The SDK's own generator uses Python's `random`. vLLM seeds that in each process, and alike on P
    and D: their spans would have the same ids.
    """

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1  # 0 is no id

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1
