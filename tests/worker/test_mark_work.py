"""MarkWork: a marker is stored, or the job says that nobody can see it."""

from __future__ import annotations

import pytest

from pdstore import HandoffId
from pdstore.format import block
from pdstore.outcome import Reason
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import get

ONE = HandoffId("1" * 32)


@pytest.mark.parametrize(("verb", "num_tokens"), [("started", 200), ("failed", 0)])
def test_a_marker_is_a_header_that_names_the_handoff(instance, store, verb, num_tokens):
    p = instance()
    job = p.pool.start_handoff(ONE, 200) if verb == "started" else p.pool.abort_handoff(ONE)
    assert job.wait(10).reason is None
    key = getattr(ONE, verb)(p.namespace)
    header = block.read_header(memoryview(get(store, [key], [block.HEADER_BYTES])[0]))
    assert header == ONE.marker(p.namespace, 0, 1, num_tokens)


def test_a_marker_that_nobody_can_see_is_lost(instance, store):
    class Forgetful(WrapperStore):
        def put(self, keys, slots):
            return len(keys)

    p = instance(over=Forgetful(store))
    assert p.pool.abort_handoff(ONE).wait(10).reason is Reason.LOST


def test_a_read_only_instance_marks_nothing(instance, store):
    p = instance(publish=False)
    assert p.pool.abort_handoff(ONE).wait(10).reason is Reason.READ_ONLY
    assert store.match([ONE.failed(p.namespace)]) == 0
