"""Layouts whose numbers do not fit together are refused, with the setting to change."""

from __future__ import annotations

import pytest

from pdstore.errors import LayoutError
from pdstore.format.pipeline import Pipeline
from tests.format.test_layout import layout


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"dtype": "float31"}, "float31"),
        ({"engine_block_tokens": 48}, "PDSTORE_BLOCK_TOKENS"),
        ({"num_shards": 3, "tp_size": 2}, "PDSTORE_KV_SHARDS"),
        (
            {"num_shards": 3},
            "8 KV heads do not split into 3 shards: PDSTORE_KV_SHARDS and the TP size must",
        ),
        ({"tp_rank": 1}, "rank 1"),
        ({"num_ranges": 4}, "3 layers do not make 4 ranges"),
        ({"pipeline": Pipeline((0, 0, 1), 0)}, "PDSTORE_LAYER_RANGES=2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, word):
    with pytest.raises(LayoutError, match=word):
        layout(**changes)
