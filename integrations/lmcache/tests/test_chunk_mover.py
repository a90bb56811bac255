"""Chunks: their names, and how they are moved."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from pdstore.errors import ConfigError, Reason, StoreTimeout
from pdstore.format import block
from pdstore.store.memory import MemoryStore
from pdstore.store.tiers.store import TieredStore
from pdstore.testing.values import fresh_keys, put, start_background
from pdstore_lmcache.chunk_mover import Chunk, ChunkFinder, ChunkMover
from pdstore_lmcache.chunk_names import ChunkName, ChunkNames, shape_of
from pdstore_lmcache.chunk_task import ChunkTask, Ended
from tests.support.kv import eventually, settings_of

SIZES = (100, 5000, 4096, 1, 9000)

NAMES = [
    ChunkName(key, bytes.fromhex(key.split(":")[1]), bytes.fromhex(key[-32:]))
    for key in fresh_keys(len(SIZES))
]


@pytest.fixture
def ends():
    return []


@pytest.fixture
def run(ends):
    """Calls a mover's method as a worker does; the last of `ends` says what became of it."""

    def run(move, chunks):
        task = ChunkTask(len(SIZES), 1, 60.0, ends.append)
        task.share_ended(move(task, chunks))
        return ends[-1]

    return run


def mover_of(store, num_bytes=64 << 10):
    return ChunkMover(store, ChunkFinder(store), memoryview(bytearray(num_bytes)))


def chunks(fill=None):
    """Each chunk's bytes are its number and 1, or `fill`."""
    return [
        Chunk(n, name, memoryview(bytearray([n + 1 if fill is None else fill] * size)))
        for n, (name, size) in enumerate(zip(NAMES, SIZES, strict=True))
    ]


def test_a_chunk_that_is_missing_keeps_no_other_from_coming(run):
    store = MemoryStore()
    mover, loaded = mover_of(store), chunks(fill=0)
    run(mover.save, [each for each in chunks() if each.number not in (1, 4)])
    ended = run(mover.load, loaded)
    assert ended.done == (True, False, True, True, False)
    assert ended.reason is Reason.LOST
    assert not any(loaded[1].memory)


@pytest.mark.parametrize("length", [64 + 5000, 64, 7000])
def test_a_wrong_value_is_removed_and_never_copied(run, length):
    store = MemoryStore()
    put(store, [NAMES[1].key], [b"x" * length])
    loaded = chunks(fill=0)
    ended = run(mover_of(store).load, loaded[1:2])
    assert ended.reason is Reason.CORRUPT
    assert not any(loaded[1].memory)
    assert store.match([NAMES[1].key]) == 0


@pytest.mark.parametrize("length", [64 + 5000, 64, 7000])
@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_value_is_removed_from_its_tier_and_loaded_from_another(run, length, number):
    tiers = [MemoryStore(), MemoryStore()]
    for tier in tiers:
        run(mover_of(tier).save, chunks())
    with contextlib.closing(TieredStore(tiers)) as store:
        tiers[number].remove([NAMES[1].key])
        put(tiers[number], [NAMES[1].key], [b"x" * length])
        if number == 1:
            tiers[0].remove([NAMES[1].key])
            put(tiers[0], [NAMES[1].key], [b"x" * length])
        loaded = chunks(fill=0)
        ended = run(mover_of(store).load, loaded)
        in_tiers = [bool(tier.match([NAMES[1].key])) for tier in tiers]
    is_right = number == 0
    assert ended.done == (True, is_right, True, True, True)
    assert ended.reason is (None if is_right else Reason.CORRUPT)
    assert [bytes(each.memory) for each in loaded if each.number != 1 or is_right] == [
        bytes(each.memory) for each in chunks() if each.number != 1 or is_right
    ]
    assert in_tiers == [False, is_right]


def test_nothing_is_copied_once_the_task_has_ended(ends):
    store = MemoryStore()
    for move in (mover_of(store).save, mover_of(store).load):
        task = ChunkTask(len(SIZES), 1, 60.0, ends.append)
        task.end(Reason.DEADLINE)
        moved = chunks(fill=0)
        move(task, moved)
        assert not any(any(chunk.memory) for chunk in moved)
    assert store.match([NAMES[0].key]) == 0


def test_the_end_of_a_task_waits_for_a_copy(ends):
    task, error = ChunkTask(2, 2, 60.0, ends.append), StoreTimeout("late")
    with task.copying() as may_copy:
        assert may_copy
        join = start_background(lambda: task.end(Reason.STORE_SLOW, error))
        eventually(lambda: task.is_over)
        assert not ends
        task.set_done(1)
    join(60.0)
    task.share_ended()
    task.end(Reason.DEADLINE)
    assert ends == [Ended((False, True), Reason.STORE_SLOW, error)]


SHAPE = shape_of([torch.Size((2, 3, 16, 32))], [torch.float16])


def chunk(**changes):
    fields = {"chunk_hash": b"h" * 32, "model_name": "m", "kv_rank": 1, "object_group_id": 0}
    return SimpleNamespace(**(fields | {"cache_salt": ""} | changes))


def names(kv_cache_dtype=None, **settings):
    return ChunkNames(settings_of(**({"weights": "w"} | settings)), kv_cache_dtype)


def test_the_name_of_a_chunk_stays_what_it_is():
    """The stored format: a pool outlives the version that filled it."""
    name = names().name(chunk(cache_salt="user"), SHAPE)
    assert name.key == (
        "pds1:c0ab18a9e72b33bfb7236be9975b40ed:0:0:0bf969dc2d9d19daab1cf19e9e7d359a"
    )
    header = block.header_of(name.start(6144))
    assert name.key == f"pds1:{header.namespace.hex()}:0:0:{header.prefix_hash.hex()}"
    assert header.payload_bytes == 6144


@pytest.mark.parametrize(
    "other",
    [
        {"chunk_hash": b"i" * 32},
        {"model_name": "n"},
        {"kv_rank": 2},
        {"object_group_id": 1},
        {"cache_salt": "user"},
        {"chunk_hash": b"h" * 31, "cache_salt": "h"},
    ],
)
def test_every_field_of_lmcaches_name_counts(other):
    made = names()
    assert made.name(chunk(), SHAPE) == made.name(chunk(), SHAPE)
    assert made.name(chunk(), SHAPE).key != made.name(chunk(**other), SHAPE).key


def test_empty_weights_are_those_of_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSTORE_WEIGHTS", "")
    keys = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(content)
        keys |= {
            names(weights=unset).name(chunk(model_name=str(tmp_path)), SHAPE).key
            for unset in (None, "")
        }
    assert len(keys) == 2


def test_weights_that_are_not_here_must_be_named():
    with pytest.raises(ConfigError, match=r"org/away is not on this host.*PDSTORE_WEIGHTS"):
        names(weights=None).name(chunk(model_name="org/away"), SHAPE)
