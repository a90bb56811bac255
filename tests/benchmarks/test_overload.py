"""A pair that is asked for far more than its queues hold loses nothing and does not grow."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.overload import measure


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_thousand_requests_at_64_at_a_time(tmp_path):
    found = asyncio.run(measure(tmp_path, 1000, 64))
    assert (found["right"], found["wrong"], found["lost"]) == (1000, 0, 0)
    assert found["prefill"]["saves"]["queue_full"] > 0
    assert found["decode"]["loads"]["queue_full"] > 0
    assert found["decode"]["load_s"]["all_below"] <= 5.0, "1 s to wait, 1 s to load, and to end"
    early, late = found["peak_mib_after_a_tenth"], found["peak_mib"]
    assert all(late[name] < early[name] + 64 for name in late), (early, late)
