"""messages: reports of ranks add up, and everything survives the way between processes."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    RankLayout,
    SaveSpec,
    StepReport,
    tables_of,
)
from pdstore.engine.request import JobEnd, LoadPlan, SavePlan
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import NO_BLOCK
from pdstore.outcome import Direction
from tests.support.kv import LAYERS, settings_of


@pytest.fixture(scope="module")
def namespace():
    from pdstore import Layout

    settings = settings_of()
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=64, rope="")
    return layout.namespace(settings, weights="w")


def test_reports_of_ranks_add_up():
    ends = [JobEnd("a", number, Direction.SAVE, 64, None) for number in (1, 2)]
    total = StepReport(Counter({1: 1, 2: 1}), ends[:1]).aggregate(StepReport(Counter({1: 1}), ends))
    assert total.released == {1: 2, 2: 1}
    assert total.ended == [ends[0], *ends]


def test_metadata_survives_pickling(namespace):
    keys = PromptKeys(namespace).extend(list(range(200)))
    handoff = HandoffId.new()
    table = tables_of([[1, 2]], 2)
    sent = PDStoreConnectorMetadata(
        [LoadSpec("load", LoadPlan(keys, 64, 200, handoff), table)],
        [SaveSpec(3, "save", SavePlan(keys, 0, handoff, ((handoff, 200),)), table)],
        [handoff],
    )
    received = pickle.loads(pickle.dumps(sent))
    [load], [save] = received.loads, received.saves
    assert load.plan.keys.store_keys(namespace.parts) == keys.store_keys(namespace.parts)
    assert (save.plan.handoff, save.plan.starts) == (handoff, ((handoff, 200),))
    assert load.block_ids == table
    assert received.aborted_handoffs == [handoff]


def test_blocks_that_a_window_has_left_are_no_blocks():
    tables = tables_of(([0, 0, 5, 6], [1, 2, 3, 4]), 3)
    assert [list(table) for table in tables] == [[NO_BLOCK, NO_BLOCK, 5], [1, 2, 3]]


def test_a_ranks_layout_survives_pickling(namespace):
    received = pickle.loads(pickle.dumps(RankLayout(namespace, 64)))
    assert received.namespace.digest == namespace.digest
    assert received.block_tokens == 64
