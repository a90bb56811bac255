"""Break-even: arithmetic that can be done by hand, and GPUs that are known."""

from __future__ import annotations

import pytest

from pdstore.cli.break_even import Machine, break_even
from pdstore.cli.model_shape import ModelShape
from pdstore.errors import ConfigError

SHAPE = ModelShape("hand", 2, 4, 100, 8, 8, 1e9, "bfloat16", 1, is_mla=False)


def test_it_is_bytes_over_the_time_to_compute_them():
    found = break_even(SHAPE, Machine("A100", 2, 0.5), 1000)
    flops = 2 * 1e9 * 1000 + 2 * 4 * 16 * 1000**2
    assert found.kv_bytes == 1000 * 2 * 100 * 2
    assert found.compute_s == pytest.approx(flops / 312e12)
    assert found.bytes_per_s == pytest.approx(found.kv_bytes / found.compute_s)


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="known are A100"):
        break_even(SHAPE, Machine("Z80"), 1000)
