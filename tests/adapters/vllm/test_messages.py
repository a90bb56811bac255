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
)
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys
from tests.support.kv import LAYERS, settings_of


@pytest.fixture(scope="module")
def namespace():
    from pdstore import Layout

    settings = settings_of()
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=64, rope="")
    return layout.namespace(settings, weights="w")


def test_reports_of_ranks_add_up():
    one = StepReport(Counter({1: 1, 2: 1}), {"a"}, {"a": (64, 1.0), "c": (9, 1.0)})
    other = StepReport(Counter({1: 1}), {"b"}, {"a": (64, 2.0)})
    total = one.aggregate(other)
    assert total.released == {1: 2, 2: 1}
    assert total.failed == {"a", "b"}
    assert total.loaded == {"a": (64, 2.0), "c": (9, 1.0)}, "the slowest rank's"


def test_metadata_survives_pickling(namespace):
    keys = PromptKeys(namespace).extend(list(range(200)))
    handoff = HandoffId.new()
    sent = PDStoreConnectorMetadata(
        [LoadSpec("load", keys, [[1, 2]], 64, 200, handoff)],
        [SaveSpec(3, "save", keys, [[1, 2]], 0, handoff)],
        [(handoff, 200)],
        [handoff],
    )
    received = pickle.loads(pickle.dumps(sent))
    assert received.loads[0].keys.store_keys(namespace.parts) == keys.store_keys(namespace.parts)
    assert received.saves[0].handoff == handoff
    assert received.started_handoffs == [(handoff, 200)]
    assert received.aborted_handoffs == [handoff]


def test_a_ranks_layout_survives_pickling(namespace):
    received = pickle.loads(pickle.dumps(RankLayout(namespace, 64)))
    assert received.namespace.digest == namespace.digest
    assert received.block_tokens == 64
