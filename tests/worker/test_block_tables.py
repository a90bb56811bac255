"""Block tables: any form that holds ints, checked where they will be used."""

from __future__ import annotations

from array import array

import pytest
import torch

from pdstore import LayerSpec, Layout
from pdstore.errors import LayoutError
from pdstore.format.layout import NO_BLOCK
from pdstore.worker.values import check_windows, tables_of
from tests.support.kv import settings_of

FULL = LayerSpec(2, 8)
SLIDING = LayerSpec(2, 8, kind="sliding", window=40, table=1)
IDS = (4, 5, 6, 7)


def layout_of(*layers):
    return Layout.of(settings_of(), dtype="float32", layers=layers, engine_block_tokens=16, rope="")


def tables(ids, *, layers=(FULL,), num_tokens=64, num_blocks=8, first_block=0):
    return tables_of(layout_of(*layers), num_tokens, ids, num_blocks, first_block)


@pytest.mark.parametrize(
    "ids",
    [IDS, list(IDS), iter(IDS), array("i", IDS), torch.tensor(IDS), [IDS], iter([iter(IDS)])],
    ids=str,
)
def test_one_table_may_come_in_any_form(ids):
    assert tables(ids) == (IDS,)


def test_several_tables_come_as_a_list_for_each():
    both = [list(IDS), [NO_BLOCK, NO_BLOCK, 2, 3]]
    assert tables(both, layers=(FULL, SLIDING)) == tuple(map(tuple, both))


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        ((1, 2, 3), "need 4 engine blocks; 3 are given"),
        ((1, 2, 3, 8), "not all in the cache of 8"),
        ((NO_BLOCK, 1, 2, 3), "not all in the cache"),
        ([IDS, IDS], "2 block tables; the layout has 1"),
        ([1.0] * 4, "ints"),
        (["a"], "need 4|ints"),
        ([None] * 4, "ints"),
    ],
)
def test_tables_that_do_not_fit_are_refused(ids, word):
    with pytest.raises(LayoutError, match=word):
        tables(ids)


def test_ids_before_the_first_block_are_not_looked_at():
    ids = (-9, -9, -9, -9, 1, 2, 3, 4)
    assert tables(ids, num_tokens=128, first_block=1) == (ids,)
    with pytest.raises(LayoutError):
        tables(ids, num_tokens=128)


def test_an_empty_prompt_has_an_empty_table():
    assert tables([], num_tokens=0) == ((),)


def test_a_window_may_begin_at_a_blocks_edge_alone():
    layout = layout_of(FULL, SLIDING)
    check_windows(layout, [range(8), [NO_BLOCK] * 4 + [1] * 4])
    with pytest.raises(LayoutError, match="a window begins inside a block"):
        check_windows(layout, [range(8), [NO_BLOCK] * 3 + [1] * 5])
