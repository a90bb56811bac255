"""Keys: prefixes, tails, items; namespaces, their differences, and the salt that is never told."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstore.format.handoff import HandoffId
from pdstore.format.keys import (
    POOL_ID_KEY,
    SHAPING,
    Kind,
    MultimodalItem,
    Namespace,
    Part,
    PromptKeys,
    int32_bytes,
    kind_of,
    prefix_of,
    shaping,
)

ROOT = Path(__file__).parents[2]
VECTORS = Path(__file__).parent / "vectors" / "keys.json"
PARTS = (Part(0, 0), Part(0, 1), Part(1, 0))
NAMESPACE = Namespace({"format": 1, "weights": "w"}, PARTS, block_tokens=4)


def reference_hashes(vector: dict) -> tuple[list[bytes], bytes | None]:
    """The format of pdstore/format/keys.py's docstring, written a second time without its code."""

    def cut(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()[:16]

    def lp(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    text = json.dumps(vector["fields"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    namespace = hashlib.sha256(text.encode()).digest()[:16]
    size = vector["block_tokens"]
    h = cut(namespace + lp(bytes.fromhex(vector["lora"])) + lp(bytes.fromhex(vector["cache_salt"])))
    hashes = []
    for first in range(0, len(vector["tokens"]), size):
        tokens = vector["tokens"][first : first + size]
        data = h + struct.pack(f"<{len(tokens)}i", *tokens)
        for offset, length, content in vector["items"]:
            if length > 0 and offset < first + len(tokens) and offset + length > first:
                data += lp(bytes.fromhex(content) + struct.pack("<i", offset - first))
        h = cut(data)
        hashes.append(h)
    tail = hashes.pop() if len(vector["tokens"]) % size else None
    return hashes, tail


def keys_of(vector: dict) -> list[str]:
    parts = tuple(Part(*p) for p in vector["parts"])
    namespace = Namespace(vector["fields"], parts, vector["block_tokens"])
    items = [
        MultimodalItem(offset, length, bytes.fromhex(h)) for offset, length, h in vector["items"]
    ]
    keys = PromptKeys(
        namespace,
        lora=bytes.fromhex(vector["lora"]),
        cache_salt=bytes.fromhex(vector["cache_salt"]),
        items=items,
    )
    return keys.extend(vector["tokens"]).store_keys(parts)


VECTOR_LIST = json.loads(VECTORS.read_text())


@pytest.mark.parametrize("vector", VECTOR_LIST, ids=lambda v: v["name"])
def test_vectors(vector):
    assert keys_of(vector) == vector["keys"]


def check_hashes(vector: dict, keys: list[str]) -> None:
    full, tail = reference_hashes(vector)
    names = [h.hex() for h in full] + ([tail.hex()] if tail else [])
    assert [key.split(":")[4] for key in keys[:: len(vector["parts"])]] == names


@pytest.mark.parametrize("vector", VECTOR_LIST, ids=lambda v: v["name"])
def test_vectors_agree_with_the_format_written_a_second_time(vector):
    check_hashes(vector, vector["keys"])


def test_each_field_changes_the_keys():
    firsts = [v["keys"][0] for v in VECTOR_LIST if v["tokens"]]
    assert len(set(firsts)) == len(firsts)


def test_weights_that_were_written_in_place_are_in_the_root_behind_all_else():
    def first(**changes):
        return PromptKeys(NAMESPACE, **changes).extend([1, 2, 3, 4]).hash_of(0)

    def lp(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    root = hashlib.sha256(NAMESPACE.digest + lp(b"l") + lp(b"") + lp(b"w")).digest()[:16]
    block = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()[:16]
    assert first(lora=b"l", weights=b"w") == block
    assert first(lora=b"l", weights=b"") == first(lora=b"l")
    changes = ({}, {"lora": b"w"}, {"cache_salt": b"w"}, {"weights": b"w"})
    assert len({first(**each) for each in changes}) == len(changes)


@pytest.mark.requirement("R10, C4, C5", "P and D compute keys by one code, in any process")
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_are_equal_in_every_process_and_hash_seed(seed):
    code = (
        "import json; from tests.format.test_keys import *;"
        "print(json.dumps([keys_of(v) for v in VECTOR_LIST]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(out.stdout) == [v["keys"] for v in VECTOR_LIST]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.data())
def test_extending_in_pieces_gives_the_keys_of_the_whole(tokens, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    items = [MultimodalItem(3, 5, b"a"), MultimodalItem(9, 1, b"b")]
    whole = PromptKeys(NAMESPACE, items=items).extend(tokens)
    pieces = PromptKeys(NAMESPACE, items=items)
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        pieces.extend(tokens[start:stop])
    assert pieces.store_keys(PARTS) == whole.store_keys(PARTS)
    assert pieces.num_tokens == len(tokens)
    assert len(pieces) == -(-len(tokens) // 4)


def test_blocks_that_the_engine_has_named_have_the_keys_of_their_prompt():
    keys = PromptKeys(NAMESPACE).extend(range(12))
    named = PromptKeys.named(NAMESPACE, [keys.hash_of(n) for n in range(3)])
    assert named.store_keys(PARTS) == keys.store_keys(PARTS)
    assert (len(named), named.num_tokens, named.end_of(2)) == (3, 12, 8)
    assert named.prefix(8).store_keys(PARTS) == keys.prefix(8).store_keys(PARTS)


def test_lists_and_int32_buffers_give_the_same_keys():
    tokens = list(range(11))
    want = PromptKeys(NAMESPACE).extend(tokens).store_keys(PARTS)
    assert PromptKeys(NAMESPACE).extend(array("i", tokens)).store_keys(PARTS) == want
    assert PromptKeys(NAMESPACE).extend(memoryview(array("i", tokens))).store_keys(PARTS) == want
    assert PromptKeys(NAMESPACE).extend(array("q", tokens)).store_keys(PARTS) == want


@pytest.mark.parametrize(
    "bad", [[-1], [2**31], [2**32 - 1], [2**32], [1, -5], array("i", [3, -1]), array("q", [2**31])]
)
def test_ids_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match="token id"):
        int32_bytes(bad)


@pytest.mark.parametrize(
    "bad", [[1.5], array("f", [1.0]), memoryview(array("f", [1.0])), b"abcd", bytearray(4)]
)
def test_ids_that_are_no_ints_are_refused(bad):
    with pytest.raises(TypeError):
        int32_bytes(bad)


def test_kinds():
    keys = PromptKeys(NAMESPACE).extend(range(6)).store_keys(PARTS[:1])
    assert [kind_of(k) for k in keys] == [Kind.BLOCK, Kind.TAIL]
    assert kind_of(HandoffId.new().done(NAMESPACE, 0)) is Kind.HANDOFF
    assert kind_of(POOL_ID_KEY) is Kind.POOL


@pytest.mark.parametrize("item", [None, MultimodalItem(2, 3, b"one"), MultimodalItem(5, 4, b"two")])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9, 11, 12])
def test_a_cut_prompt_has_the_keys_of_the_shorter_one(item, num_tokens):
    items = [item] if item else []
    keys = PromptKeys(NAMESPACE, items=items).extend(range(num_tokens))
    for shorter in range((len(keys) - 1) * 4, num_tokens + 1):
        cut = keys.cut(shorter)
        alone = PromptKeys(NAMESPACE, items=items).extend(range(shorter))
        assert cut.store_keys(NAMESPACE.parts) == alone.store_keys(NAMESPACE.parts)
        assert cut.num_tokens == shorter
        longer = cut.extend(range(shorter, 20)).store_keys(NAMESPACE.parts)
        assert longer == PromptKeys(NAMESPACE, items=items).extend(range(20)).store_keys(
            NAMESPACE.parts
        )
    assert keys.num_tokens == num_tokens


def test_a_prompt_cannot_be_cut_before_its_last_block():
    keys = PromptKeys(NAMESPACE).extend(range(12))
    for num_tokens in (7, 13, -1):
        with pytest.raises(ValueError, match="before the last block"):
            keys.cut(num_tokens)
    for short in (keys.prefix(8), keys.cut(8)):
        with pytest.raises(ValueError, match="before the last block"):
            short.cut(6)


ITEMS = st.lists(
    st.builds(
        MultimodalItem, st.integers(-5, 60), st.integers(0, 30), st.binary(min_size=1, max_size=2)
    ),
    max_size=8,
)


@pytest.mark.requirement("C2", "a tail's key has the images in it")
@given(ITEMS, st.integers(1, 40))
def test_every_block_and_the_tail_have_the_items_that_touch_them_in_the_order_given(items, count):
    told = [[item.offset, item.length, item.content_hash.hex()] for item in items]
    vector = {**VECTOR_LIST[0], "tokens": [7] * count, "items": told}
    check_hashes(vector, keys_of(vector))


PLAIN = dict.fromkeys(SHAPING)


def test_a_namespaces_keys_are_those_that_begin_with_its_prefix():
    prefix = prefix_of(NAMESPACE.hex)
    keys = PromptKeys(NAMESPACE).extend(range(100)).store_keys(NAMESPACE.parts)
    keys += [HandoffId.new().done(NAMESPACE, 3), HandoffId.new().failed(NAMESPACE)]
    assert all(key.startswith(prefix) for key in keys)
    assert not POOL_ID_KEY.startswith(prefix)


def test_differences_name_the_fields_and_never_the_salt():
    a = Namespace({"weights": "x", "dtype": "float32", "salt": "a" * 64}, PARTS, 4)
    b = Namespace({"weights": "y", "dtype": "float32", "salt": "b" * 64}, PARTS, 4)
    lines = a.differences(b.described)
    assert [line.split(":")[0] for line in lines] == ["salt", "weights"]
    assert "aaaa" not in str(a.described)
    assert a.differences(a.described) == []


@pytest.mark.misconfiguration("P and D have two versions of pdstore, whose formats differ")
def test_another_format_is_told_to_be_another_version_of_pdstore():
    a, b = (Namespace({"format": number}, PARTS, 4) for number in (1, 2))
    [line] = a.differences(b.described)
    assert (
        line == "format: 2 there, 1 here (two versions of pdstore: install the same one for both)"
    )


def test_blocks_and_states_that_differ_are_told_with_what_decides_them():
    ours = Namespace({"block_tokens": 128, "form": [None, "conv, SD"]}, PARTS, 128)
    theirs = Namespace({"block_tokens": 256, "form": [None, "conv, DS"]}, PARTS, 256)
    blocks, form = ours.differences(theirs.described)
    assert blocks.startswith("block_tokens: 256 there, 128 here (PDSTORE_BLOCK_TOKENS; ")
    assert "the TP size, the dtypes and speculation decide: make them equal" in blocks
    assert form.startswith('form: 1 x null, 1 x "conv, DS" there, 1 x null, 1 x "conv, SD" here (')
    assert "give both engines the same version, dtypes, kernels, block size and kind of GPU" in form


@pytest.mark.parametrize(
    "bad", ["", "0" * 31, "A" * 32, "0" * 33, "../" + "0" * 29, "0" * 32 + "\n"]
)
def test_a_namespace_that_is_no_digest_has_no_prefix(bad):
    with pytest.raises(ValueError, match="32 lower-case hex digits"):
        prefix_of(bad)


def test_equal_layers_are_told_once_so_that_a_difference_can_be_read():
    a, b = (
        Namespace({"layers": [["attention", heads, 128, 256]] * 32}, PARTS, 4) for heads in (8, 4)
    )
    (line,) = a.differences(b.described)
    assert line == ('layers: 32 x ["attention",4,128,256] there, 32 x ["attention",8,128,256] here')


def test_a_property_that_is_no_json_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        Namespace({"scale": float("nan")}, PARTS, 4)


@pytest.mark.parametrize("field", SHAPING)
def test_every_field_that_shapes_the_kv_counts(field):
    other = {**PLAIN, field: {"rope_type": "yarn"} if field.startswith("rope") else 7}
    assert shaping(other, max_model_len=1) != shaping(PLAIN, max_model_len=1)


def test_the_longest_prompt_counts_for_longrope_alone():
    long = {**PLAIN, "rope_scaling": {"type": "longrope"}}
    assert shaping(long, max_model_len=1) != shaping(long, max_model_len=2)
    assert shaping(PLAIN, max_model_len=1) == shaping(PLAIN, max_model_len=2)
