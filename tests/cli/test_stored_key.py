"""StoredKey reads back what the key format writes."""

from __future__ import annotations

import pytest

from pdstore.cli.stored_key import StoredKey
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import POOL_ID_KEY, Kind, PromptKeys
from pdstore.format.namespace import Part
from tests.support.command import namespace_of

NAMESPACE = namespace_of("any", parts=(Part(2, 3),))


def test_blocks_and_tails_are_read_back():
    keys = PromptKeys(NAMESPACE).extend(range(20))
    block, tail = map(StoredKey.of, keys.store_keys(NAMESPACE.parts))
    hashes = [keys.hash_of(number).hex() for number in (0, 1)]
    assert block == (Kind.BLOCK, NAMESPACE.hex, 2, 3, hashes[0], None, None)
    assert tail == (Kind.TAIL, NAMESPACE.hex, 2, 3, hashes[1], 4, None)


def test_markers_and_the_pools_id_are_read_back():
    handoff = HandoffId.new()
    marker = StoredKey.of(handoff.done(NAMESPACE, 5))
    assert marker == (Kind.HANDOFF, NAMESPACE.hex, 0, 5, handoff.hex, None, "done")
    stage = StoredKey.of(handoff.stage_done(NAMESPACE, 5, 12))
    assert stage == marker._replace(state="stage12")
    assert StoredKey.of(POOL_ID_KEY).kind is Kind.POOL


@pytest.mark.parametrize(
    "text",
    [
        *("", "pds1:", "pds1:doctor:00", f"pds1:{'a' * 32}:0:0:short"),
        *(f"pds1:{'a' * 32}:{number}:0:{'b' * 32}" for number in ("9" * 5000, "\u0661", "-1")),
        f"pds1:{'a' * 32}:0:0:{'b' * 32}:partial:{'9' * 5000}",
        f"pds1:{'a' * 32}:handoff:{'b' * 32}:0:d\u00f6ne",
    ],
)
def test_other_texts_are_no_keys(text):
    assert StoredKey.of(text) is None
