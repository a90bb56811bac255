"""Clearing a namespace: all of it goes, and nothing else."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from pdstore.errors import StoreFull
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.store.base import Store
from pdstore.testing.values import (
    assert_stored,
    assert_values,
    content,
    contents,
    get,
    put,
    run_together,
)

SIZE = 256


class ClearTests:
    """A namespace is blocks of any group and shard, tails and markers."""

    deadline_s: ClassVar[float] = 30.0
    clears_under_readers: ClassVar[bool] = False

    @pytest.fixture
    def namespace(self) -> str:
        return secrets.token_hex(16)

    @pytest.fixture
    def pool_id(self, store: Store) -> Iterator[None]:
        """The pool has an id; it is not ours to remove if it had one already."""
        had_one = store.match([POOL_ID_KEY]) == 1
        put(store, [POOL_ID_KEY], [content(POOL_ID_KEY, 64)])
        yield
        if not had_one:
            store.remove([POOL_ID_KEY])

    def test_clear_forgets_blocks_tails_and_markers_leased_or_not(
        self, store: Store, peer: Store, namespace: str
    ) -> None:
        keys = _one_of_each(namespace)
        _put(store, keys[::2])
        _put(peer, keys[1::2])
        assert store.match(keys[2:]) == peer.match(keys[2:]) == len(keys) - 2
        store.clear(namespace)
        for key in keys:
            assert peer.match([key]) == store.match([key]) == 0
            assert_values(get(store, [key], [SIZE]), [])

    def test_clear_forgets_3000_values(self, store: Store, namespace: str) -> None:
        keys = [BlockKey(f"pds1:{namespace}:0:0:{i:032x}") for i in range(3000)]
        put(store, keys, [b"x"] * len(keys))
        assert store.match(keys) == len(keys)
        store.clear(namespace)
        assert _stored(store, keys) == []

    @pytest.mark.usefixtures("pool_id")
    def test_clear_leaves_all_other_keys(self, store: Store, namespace: str) -> None:
        other = secrets.token_hex(16)
        kept = [key for near in (*_neighbours(namespace), other) for key in _one_of_each(near)]
        kept += [  # keys that name the namespace elsewhere
            BlockKey(f"pds1:{other}:0:0:{namespace}"),
            BlockKey(f"pds1:{other}:0:0:{namespace}:partial:3"),
            BlockKey(f"pds1:{other}:handoff:{namespace}:0:done"),
        ]
        _put(store, [*kept, *_one_of_each(namespace)])
        store.clear(namespace)
        assert _stored(store, [*kept, POOL_ID_KEY]) == [*kept, POOL_ID_KEY]
        assert_stored(store, kept, contents(kept, SIZE))

    def test_a_namespace_may_be_empty_and_its_keys_take_new_bytes(
        self, store: Store, namespace: str
    ) -> None:
        store.clear(namespace)
        keys = _one_of_each(namespace)
        _put(store, keys)
        store.clear(namespace)
        store.clear(namespace)
        assert _stored(store, keys) == []
        new = contents(keys, SIZE, version=1)
        assert put(store, keys, new) == len(keys)
        assert_stored(store, keys, new)

    @pytest.mark.parametrize(
        "bad",
        ["", "{31}", "{31}0\n", "{31}A", "{31}*", "{31}00", "pds1:{31}0:", "." * 32, ".*", "pool"],
        ids=repr,
    )
    def test_what_is_no_namespace_is_refused(self, store: Store, namespace: str, bad: str) -> None:
        """`{31}` stands for the first 31 digits of a namespace that has values."""
        keys = _one_of_each(namespace)
        _put(store, keys)
        with pytest.raises(ValueError, match="a namespace is 32"):
            store.clear(bad.replace("{31}", namespace[:31]))
        assert _stored(store, keys) == keys

    def test_clear_beside_writers_and_readers_harms_nobody(
        self, store: Store, peer: Store, namespace: str
    ) -> None:
        keys, kept = _one_of_each(namespace), _one_of_each(secrets.token_hex(16))
        values, done = contents(keys, SIZE), threading.Event()
        _put(store, [*keys, *kept])

        def write() -> None:
            while not done.is_set():
                with contextlib.suppress(StoreFull):  # a put looks afterwards, and all was gone
                    put(peer, keys, values)

        def read() -> None:
            while not done.is_set():
                found = get(store, keys, [SIZE] * len(keys))
                if not self.clears_under_readers:
                    assert_values(found, values[: len(found)])
                assert peer.match(kept) == len(kept)

        def clear() -> None:
            try:
                for _ in range(20):
                    store.clear(namespace)
            finally:
                done.set()

        run_together(write, read, clear, clear, deadline_s=self.deadline_s)
        store.clear(namespace)
        assert _stored(store, keys) == []
        assert store.match(kept) == len(kept)


def _one_of_each(namespace: str) -> list[BlockKey]:
    """A key of each kind that a namespace has, and of several groups and shards."""
    stem, name = f"pds1:{namespace}", secrets.token_hex(16)
    return [
        BlockKey(key)
        for key in (
            *(f"{stem}:{group}:{shard}:{name}" for group, shard in ((0, 0), (0, 7), (12, 3))),
            f"{stem}:0:0:{name}:partial:1",
            f"{stem}:12:3:{name}:partial:63",
            f"{stem}:handoff:{name}:0:done",
            f"{stem}:handoff:{name}:7:done",
            f"{stem}:handoff:{name}:0:failed",
        )
    ]


def _neighbours(namespace: str) -> list[str]:
    """Namespaces that differ in one digit: the first, the second, one in the middle, the last."""
    return [
        namespace[:at] + f"{int(namespace[at], 16) ^ 1:x}" + namespace[at + 1 :]
        for at in (0, 1, 16, 30, 31)
    ]


def _put(store: Store, keys: list[BlockKey]) -> None:
    assert put(store, keys, contents(keys, SIZE)) == len(keys)


def _stored(store: Store, keys: list[BlockKey]) -> list[BlockKey]:
    """Returns the keys that are stored, asked one by one: a match stops at the first gap."""
    return [key for key in keys if store.match([key])]
