"""Pipelines: no KV group lies in two stages, or the user is told which ranges would fit."""

from __future__ import annotations

import pytest

from pdstore.errors import LayoutError
from pdstore.format.layer_groups import range_of
from pdstore.format.layer_spec import LayerSpec
from pdstore.format.pipeline import Pipeline

FULL = LayerSpec(8, 128)
SLIDING = LayerSpec(8, 128, kind="sliding", window=1024, table=1)


def pipeline(*counts: int, stage: int = 0) -> Pipeline:
    return Pipeline(tuple(n for n, count in enumerate(counts) for _ in range(count)), stage)


@pytest.mark.parametrize("num_ranges", [2, 4])
@pytest.mark.parametrize("num_layers", range(4, 130))
def test_two_stages_as_engines_cut_them_fit_the_usual_ranges(num_layers, num_ranges):
    """Of an odd number of layers the first stage has one more, as in vLLM."""
    half = num_layers // 2
    pipeline(num_layers - half, half).check([FULL] * num_layers, num_ranges)


@pytest.mark.parametrize(
    ("counts", "num_ranges", "fitting"),
    [((16, 16), 1, 2), ((16, 16), 3, 2), ((8, 8, 8, 8), 2, 4), ((7, 8, 8, 7), 4, 19)],
)
def test_stages_that_end_inside_a_range_are_refused_with_the_number_that_fits(
    counts, num_ranges, fitting
):
    layers = [FULL] * sum(counts)
    with pytest.raises(LayoutError, match=f"set PDSTORE_LAYER_RANGES={fitting} on P and on D"):
        pipeline(*counts).check(layers, num_ranges)
    pipeline(*counts).check(layers, fitting)
    starts = [sum(counts[:n]) for n in range(1, len(counts))]
    for start in starts:
        before, after = (range_of(n, len(layers), fitting) for n in (start - 1, start))
        assert before < after


def test_stages_that_no_number_of_ranges_fits_are_refused():
    with pytest.raises(LayoutError, match="no PDSTORE_LAYER_RANGES up to 64"):
        pipeline(1, 126).check([FULL] * 127, 4)


def test_stages_may_alternate_where_layers_are_in_the_order_of_their_tables():
    layers, stages = [FULL] * 4 + [SLIDING] * 4, (0, 0, 1, 1, 0, 0, 1, 1)
    Pipeline(stages, 1).check(layers, 4)
    assert Pipeline(stages, 1).layers == (2, 3, 6, 7)
    with pytest.raises(LayoutError, match="PDSTORE_LAYER_RANGES=4"):
        Pipeline(stages, 1).check(layers, 2)


@pytest.mark.parametrize(
    "wrong", [Pipeline((0, 0), 0), Pipeline((0, 2, 2), 0), Pipeline((0, 1, 1), 2)]
)
def test_stages_that_are_not_those_of_the_layers_are_refused(wrong):
    with pytest.raises(LayoutError, match="stage"):
        wrong.check([FULL] * 3, 3)
