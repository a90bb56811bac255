"""The simulated cells: `auto` is never far from the better of loading and computing."""

from __future__ import annotations

import pytest

from benchmarks.decide.__main__ import p99_of

JITTER = 0.02
WORST = 1.05


@pytest.mark.parametrize(
    ("store_gb_s", "at_once"), [(0.1, 1), (0.1, 4), (2.5, 1), (2.5, 8), (25.0, 1), (25.0, 8)]
)
def test_auto_is_within_five_percent_of_the_better_way(store_gb_s, at_once):
    cell = (store_gb_s, at_once, 8192)
    load, compute, auto = (p99_of(mode, *cell, JITTER, 200) for mode in ("always", "never", "auto"))
    assert auto <= WORST * min(load, compute)


def test_a_store_of_twice_the_rate_halves_what_always_takes():
    slow, fast = (p99_of("always", rate, 4, 32_768, 0.0, 40) for rate in (1.0, 2.0))
    assert slow == pytest.approx(2 * fast, rel=0.05)
