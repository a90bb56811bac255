"""SpanIds: processes that seed `random` alike, as vLLM's do, make no spans of the same id."""

from __future__ import annotations

import random

from pdstore.telemetry.spans import open_provider


def test_a_seed_that_two_processes_share_gives_their_spans_no_common_id():
    state, ids = random.getstate(), []
    for _ in range(2):
        random.seed(0)
        provider = open_provider("http://127.0.0.1:9", "test")
        context = provider.get_tracer("test").start_span("never ended").get_span_context()
        ids += [context.span_id, context.trace_id]
        provider.shutdown()
    random.setstate(state)
    assert len(set(ids)) == 4
