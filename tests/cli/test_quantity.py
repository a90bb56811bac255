"""Quantities as people read them."""

from __future__ import annotations

import pytest

from pdstore.cli import quantity


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        *((None, "-"), (0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB")),
        *((1023 << 20, "0.999 GiB"), (5 << 50, "5.12e+03 TiB")),
    ],
)
def test_sizes(num_bytes, said):
    assert quantity.size(num_bytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (8.2, "8 s"), (720, "12 min"), (10_800, "3 h"), (432_000, "5 d")],
)
def test_ages(seconds, said):
    assert quantity.age(seconds) == said


def test_counts_and_durations():
    assert quantity.count(1234567) == "1,234,567"
    assert [quantity.counted(n, "value") for n in (0, 1, 1200)] == [
        *("0 values", "1 value", "1,200 values")
    ]
    assert [quantity.duration(s) for s in (0.00031, 1.23)] == ["0.31 ms", "1.23 s"]
