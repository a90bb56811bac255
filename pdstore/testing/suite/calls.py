"""Tests of what `match`, `get`, `put`, `remove` and `clear` promise for values and batches."""

from __future__ import annotations

import contextlib
import mmap
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from pdstore.errors import StoreFull, WrongLength
from pdstore.format.keys import POOL_ID_KEY, PURGE_PREFIX, BlockKey
from pdstore.native.library import address_of
from pdstore.store.base import MAX_KEY_CHARS, Slots, Store
from pdstore.testing.values import (
    assert_stored,
    assert_values,
    content,
    contents,
    empty_slots,
    filled_slots,
    fresh_keys,
    get,
    put,
    put_new,
    run_together,
)

SIZE = 4096
SMALL = 256
STATE_SIZE = 1 << 20
ODD_SIZES = [1, 2, 3, 63, 64, 65, 4095, 4097, 65535, 65536, 65537, 262143, 262145, 300001]

Verb = Callable[[Store, Sequence[BlockKey]], object]

VERBS: dict[str, Verb] = {
    "match": lambda store, keys: store.match(keys),
    "get": lambda store, keys: store.get(keys, empty_slots([SMALL] * len(keys))),
    "put": lambda store, keys: store.put(keys, filled_slots([b"x" * SMALL] * len(keys))),
    "remove": lambda store, keys: store.remove(keys),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


class CallTests:
    """Tests that values come back whole and unchanged, and that a result n means "the first n".

    A missing key makes n smaller. A bad argument raises ValueError. After a call, the store does
    not use the caller's memory any more.
    """

    def write_raw(self, store: Store, key: BlockKey, data: bytes) -> None:
        """Writes a value into the pool without calling the store; a subclass may override this."""
        pytest.skip("this store's suite has no `write_raw`")

    def test_every_user_of_the_pool_gets_what_was_put(self, store: Store, peer: Store) -> None:
        keys, values = put_new(store, 5, SIZE)
        for user in (store, peer):
            assert user.match(keys) == 5
            assert_stored(user, keys, values)

    @pytest.mark.parametrize("size", [SIZE, SIZE // 2])
    def test_put_of_stored_keys_accepts_them_and_keeps_their_bytes(
        self, store: Store, size: int
    ) -> None:
        keys = fresh_keys(6)
        first = contents(keys, SIZE)
        second = contents(keys, size, version=1)
        put(store, keys[1:4], first[1:4])
        assert put(store, keys, second) == 6
        assert put(store, keys, first) == 6
        assert_stored(store, keys, [second[0], *first[1:4], *second[4:]])

    def test_put_does_not_keep_the_callers_memory(self, store: Store) -> None:
        """Checks as well that `get` copies values and never lends the store's own memory."""
        keys = fresh_keys(2)
        values = contents(keys, SIZE)
        slots = filled_slots(values)
        for call in (store.put, store.get):
            assert call(keys, slots) == 2
            slots.view[:] = b"\0" * len(slots.view)
            assert_stored(store, keys, values)

    @pytest.mark.parametrize("sizes", [ODD_SIZES, [4 << 20] * 5], ids=["odd", "4 MiB"])
    def test_values_may_have_any_size(self, store: Store, sizes: list[int]) -> None:
        keys = fresh_keys(len(sizes))
        values = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert put(store, keys, values) == len(sizes)
        assert_stored(store, keys, values)

    def test_the_ith_value_goes_with_the_ith_slot_and_no_byte_beside_it(self, store: Store) -> None:
        keys = tuple(fresh_keys(4))  # a tuple, because keys may be any sequence
        values = [content(key, size) for key, size in zip(keys, (SIZE, 100, 1, 7), strict=True)]
        assert store.put(keys, filled_slots(values, slot_bytes=SIZE, numbers=(6, 0, 3, 1))) == 4
        assert store.match(keys) == 4
        right = filled_slots(values, slot_bytes=SIZE, numbers=range(7, -1, -2))
        found = empty_slots(right.sizes, slot_bytes=SIZE, numbers=right.numbers)
        assert store.get(keys, found) == 4
        assert_values([bytes(found.view)], [bytes(right.view)])
        store.remove(keys)

    def test_a_large_state_lies_beside_the_small_values_of_its_block(
        self, store: Store, peer: Store
    ) -> None:
        """Hybrid models are stored so: each block has tokens, few have a state (another group).

        Checks as well that each of the two can be removed alone.
        """
        tokens = fresh_keys(6)
        states = [BlockKey(key.replace(":0:0:", ":1:0:")) for key in tokens]
        keys = [*tokens[:3], states[2], *tokens[3:], states[5]]
        values = [content(key, STATE_SIZE if key in states else SMALL) for key in keys]
        assert put(store, keys, values) == len(keys)
        assert [peer.match([key]) for key in states] == [0, 0, 1, 0, 0, 1]
        assert peer.match([*tokens, states[5]]) == 7
        assert_stored(peer, keys, values)
        store.remove([states[2], tokens[5]])
        assert [peer.match([key]) for key in (*tokens, *states)] == [1] * 5 + [0] * 6 + [1]
        assert_stored(peer, [states[5]], values[-1:])

    def test_keys_that_differ_only_at_their_end_are_different(self, store: Store) -> None:
        [block] = fresh_keys(1)
        longest = block.ljust(MAX_KEY_CHARS - 1, "f")
        handoff = f"pds1:{secrets.token_hex(16)}:handoff:{secrets.token_hex(16)}:0"
        names = [
            *(block, *(f"{block}:partial:{n}" for n in (1, 10, 11, 63))),
            *(longest, *(longest + digit for digit in "0123456789abcdef")),
            *(f"{handoff}:{state}" for state in ("started", "done", "failed")),
        ]
        keys = [BlockKey(name) for name in names]
        for key in keys:
            assert store.match([key]) == 0
            put(store, [key], [content(key, 64)])
        assert store.match(keys) == len(keys)
        assert_stored(store, keys, contents(keys, 64))

    @pytest.mark.parametrize("asked", [1, SIZE - 1, SIZE + 1, 2 * SIZE, 300_000])
    def test_wrong_length_counts_the_values_before_it(self, store: Store, asked: int) -> None:
        keys, values = put_new(store, 4, SIZE)
        for where in range(4):
            slots = empty_slots([asked if i == where else SIZE for i in range(4)])
            with pytest.raises(WrongLength) as caught:
                store.get(keys, slots)
            assert caught.value.num_done == where
            assert_values([bytes(slots.value(i)) for i in range(where)], values[:where])

    @pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1])
    def test_a_planted_value_of_another_length_raises_wrong_length(
        self, store: Store, length: int
    ) -> None:
        right, wrong = fresh_keys(2)
        value = content(right, SIZE)
        self.write_raw(store, right, value)
        self.write_raw(store, wrong, b"x" * length)
        assert_stored(store, [right], [value])
        with pytest.raises(WrongLength):
            store.get([wrong], empty_slots([SIZE]))

    def test_a_gap_ends_a_get_before_a_value_of_another_length(self, store: Store) -> None:
        keys, (first, _, _) = put_new(store, 3, SIZE)
        store.remove(keys[1:2])
        assert_values(get(store, keys, [SIZE, SIZE, SIZE + 1]), [first])

    def test_remove_forgets_a_leased_value_and_no_other(self, store: Store) -> None:
        keys, values = put_new(store, 3, SIZE)
        tail = BlockKey(f"{keys[1]}:partial:3")
        put(store, [tail], [content(tail, SIZE)])
        assert store.match(keys) == 3
        store.remove(keys[1:2])
        assert store.match(keys[1:2]) == 0
        assert_stored(store, [keys[0], keys[2], tail], [*values[::2], content(tail, SIZE)])

    def test_remove_of_missing_keys_is_fine(self, store: Store) -> None:
        keys = fresh_keys(3)
        put(store, keys[1:2], [content(keys[1], SIZE)])
        store.remove(keys)
        store.remove(keys)
        assert store.match(keys[1:2]) == 0

    def test_a_removed_key_takes_new_bytes(self, store: Store) -> None:
        """Checks as well that the new bytes may be longer: so a value that was cut is replaced."""
        keys, _ = put_new(store, 3, SIZE - 1)
        store.remove(keys)
        assert [store.match([key]) for key in keys] == [0, 0, 0]
        assert_values(get(store, keys, [SIZE] * 3), [])
        values = contents(keys, SIZE, version=1)
        assert put(store, keys, values) == 3
        assert_stored(store, keys, values)

    def test_missing_keys_are_a_miss(self, store: Store) -> None:
        keys = fresh_keys(5)
        assert store.match(keys) == 0
        assert_values(get(store, keys, [SMALL] * 5), [])

    @pytest.mark.parametrize("gap", range(6))
    def test_the_first_gap_ends_an_answer_and_hides_no_other_value(
        self, store: Store, gap: int
    ) -> None:
        keys = fresh_keys(6)
        values = contents(keys, SMALL)
        behind = slice(gap + 1, None)
        put(store, keys[:gap] + keys[behind], values[:gap] + values[behind])
        assert store.match(keys) == gap
        assert_values(get(store, keys, [SMALL] * 6), values[:gap])
        assert_stored(store, keys[behind], values[behind])
        put(store, [keys[gap]], [values[gap]])
        assert_stored(store, keys, values)

    def test_a_batch_may_have_2000_keys(self, store: Store) -> None:
        keys, values = put_new(store, 2000, SMALL)
        assert store.match(keys) == 2000
        assert_stored(store, keys, values)
        for gap in (1, 31, 32, 33, 63, 64, 128, 159, 160, 161, 511, 671, 672, 699, 1999):
            store.remove([keys[gap]])
            assert store.match(keys) == gap
            put(store, [keys[gap]], [values[gap]])

    def test_an_empty_batch_is_zero(self, store: Store) -> None:
        nothing = empty_slots([])
        assert (store.match([]), store.get([], nothing), store.put([], nothing)) == (0, 0, 0)
        store.remove([])

    @every_verb
    def test_a_key_given_twice_is_refused(self, store: Store, verb: Verb) -> None:
        keys, _ = put_new(store, 3, SMALL)
        with pytest.raises(ValueError, match="distinct"):
            verb(store, [*keys, keys[1]])

    @every_verb
    @pytest.mark.parametrize(
        "bad",
        ["", "a/b", "/a", "a/", ".", "..", ".a", "a\nb", "a\0b", "\u00fc", "k" * 201],
        ids=lambda bad: repr(bad[:9]),
    )
    def test_what_is_no_key_is_refused(self, store: Store, verb: Verb, bad: str) -> None:
        keys = fresh_keys(2)
        with pytest.raises(ValueError, match="bad block key"):
            verb(store, [keys[0], BlockKey(bad), keys[1]])

    @pytest.mark.parametrize(
        "change",
        [
            {"numbers": [0]},
            {"sizes": [SMALL]},
            {"sizes": [SMALL, 0]},
            {"sizes": [SMALL, SMALL + 1]},
            {"sizes": [SMALL, -1]},
            {"numbers": [0, 2]},
            {"numbers": [0, -1]},
        ],
        ids=str,
    )
    def test_slots_that_do_not_fit_are_refused(self, store: Store, change: dict[str, Any]) -> None:
        keys = fresh_keys(2)
        bad = replace(filled_slots([b"x" * SMALL] * 2), **change)
        for call in (store.put, store.get):
            with pytest.raises(ValueError, match=r"slot|not as many"):
                call(keys, bad)
        assert store.match(keys) == 0

    def test_allocated_memory_is_zeroed_and_aligned_and_takes_values(self, store: Store) -> None:
        view = store.allocate(3 * mmap.PAGESIZE)
        assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
        assert len(view) >= 3 * mmap.PAGESIZE
        assert bytes(view) == bytes(len(view))
        assert address_of(view) % mmap.PAGESIZE == 0
        keys, values = put_new(store, 2, SIZE)
        slots = Slots(view, SIZE, [1, 0], [SIZE, SIZE])
        assert store.get(keys, slots) == 2
        assert_values([bytes(slots.value(i)) for i in range(2)], values)
        store.remove(keys)
        assert store.put(keys, slots) == 2
        assert_stored(store, keys, values)

    def test_a_store_says_where_it_is_and_what_it_promises(self, store: Store) -> None:
        assert "://" in store.label
        assert isinstance(store.lease_s, float)
        assert 0 <= store.lease_s < 1e9


class ClearTests:
    """Tests that `clear` forgets a namespace: blocks of any group and shard, tails and markers."""

    deadline_s: ClassVar[float] = 30.0
    clears_under_readers: ClassVar[bool] = False

    @pytest.fixture
    def namespace(self) -> str:
        return secrets.token_hex(16)

    @pytest.fixture
    def pool_id(self, store: Store) -> Iterator[None]:
        """Gives the pool an id; removes it at the end unless the pool had an id before."""
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
            assert_values(get(store, [key], [SMALL]), [])

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
        kept += [  # keys of another namespace that contain these 32 digits elsewhere
            BlockKey(f"pds1:{other}:0:0:{namespace}"),
            BlockKey(f"pds1:{other}:0:0:{namespace}:partial:3"),
            BlockKey(f"pds1:{other}:handoff:{namespace}:0:done"),
        ]
        _put(store, [*kept, *_one_of_each(namespace)])
        number = BlockKey(f"{PURGE_PREFIX}{namespace}:9")
        put(store, [number], [content(number, 64)])
        store.clear(namespace)
        assert _stored(store, [*kept, POOL_ID_KEY, number]) == [*kept, POOL_ID_KEY, number]
        store.remove([number])
        assert_stored(store, kept, contents(kept, SMALL))

    def test_a_namespace_may_be_empty_and_its_keys_take_new_bytes(
        self, store: Store, namespace: str
    ) -> None:
        store.clear(namespace)
        keys = _one_of_each(namespace)
        _put(store, keys)
        store.clear(namespace)
        store.clear(namespace)
        assert _stored(store, keys) == []
        new = contents(keys, SMALL, version=1)
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
        keys = _one_of_each(namespace)
        kept = _one_of_each(secrets.token_hex(16))
        values = contents(keys, SMALL)
        done = threading.Event()
        _put(store, [*keys, *kept])

        def write() -> None:
            while not done.is_set():
                with contextlib.suppress(StoreFull):  # raised if a clear comes during the put
                    put(peer, keys, values)

        def read() -> None:
            while not done.is_set():
                found = get(store, keys, [SMALL] * len(keys))
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
    """Returns keys of each kind that a namespace has, for several groups and shards."""
    stem = f"pds1:{namespace}"
    name = secrets.token_hex(16)
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
    """Returns namespaces that differ from this one in one digit, at an end or in the middle."""
    return [
        namespace[:at] + f"{int(namespace[at], 16) ^ 1:x}" + namespace[at + 1 :]
        for at in (0, 1, 16, 30, 31)
    ]


def _put(store: Store, keys: list[BlockKey]) -> None:
    assert put(store, keys, contents(keys, SMALL)) == len(keys)


def _stored(store: Store, keys: list[BlockKey]) -> list[BlockKey]:
    """Returns the keys that are stored; asks one by one, because a match ends at the first gap."""
    return [key for key in keys if store.match([key])]
