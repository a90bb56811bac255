"""Tests of concurrent calls, and of `close`: called twice, under load, and in a forked child."""

from __future__ import annotations

import os
import secrets
import threading
import time
from functools import partial
from typing import ClassVar

import pytest

from pdstore.errors import StoreClosed, StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.testing.suite.calls import VERBS
from pdstore.testing.values import (
    assert_stored,
    assert_values,
    content,
    contents,
    exit_code_of,
    fresh_keys,
    get,
    put,
    put_new,
    run_together,
    start_background,
)

SIZE = 64 << 10
SMALL = 4096


class ConcurrencyTests:
    """Tests that a value appears whole or not at all, and that calls on several threads work.

    `close` must end in limited time. In a forked child it must leave the parent's store open.
    """

    deadline_s: ClassVar[float] = 30.0
    has_one_version: ClassVar[bool] = True

    def test_a_value_appears_whole_or_not_at_all(self, store: Store, peer: Store) -> None:
        keys = fresh_keys(30)
        values = contents(keys, 4 * SIZE)

        def write() -> None:
            for key, value in zip(keys, values, strict=True):
                put(store, [key], [value])

        def read() -> None:
            for key, value in zip(keys, values, strict=True):
                assert_values([_wait_for(peer, key, len(value), self.deadline_s)], [value])

        run_together(write, read, read, deadline_s=self.deadline_s)

    def test_what_match_found_can_be_read(self, store: Store, peer: Store) -> None:
        keys = fresh_keys(30)
        values = contents(keys, SIZE)

        def write() -> None:
            for start in range(0, 30, 5):
                put(store, keys[start : start + 5], values[start : start + 5])

        def read() -> None:
            end = time.monotonic() + self.deadline_s
            n = 0
            while n < len(keys) and time.monotonic() < end:
                n = peer.match(keys)
                assert_values(get(peer, keys[:n], [SIZE] * n), values[:n])
            assert n == len(keys)

        run_together(write, read, deadline_s=self.deadline_s)

    def test_two_writers_of_one_key_are_not_mixed(self, store: Store, peer: Store) -> None:
        keys = fresh_keys(20)
        versions = contents(keys, SIZE), contents(keys, SIZE, version=1)
        start = threading.Barrier(3)
        seen = list[bytes]()

        def write(to: Store, values: list[bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                start.wait(self.deadline_s)
                assert put(to, [key], [value]) == 1

        def read() -> None:
            for key in keys:
                start.wait(self.deadline_s)
                seen.append(_wait_for(store, key, SIZE, self.deadline_s))

        writers = [partial(write, *pair) for pair in zip((store, peer), versions, strict=True)]
        run_together(*writers, read, deadline_s=self.deadline_s)
        for key, first, *either in zip(keys, seen, *versions, strict=True):
            assert first in either
            if self.has_one_version:
                assert_stored(store, [key], [first])
                assert_stored(peer, [key], [first])
            else:
                assert all(get(user, [key], [SIZE])[0] in either for user in (store, peer))

    def test_many_threads_get_what_they_ask_for(self, store: Store) -> None:
        shared, shared_values = put_new(store, 16, SIZE)

        def call(first: int) -> None:
            for start in range(first, first + 6):
                own, values = put_new(store, 4, SIZE)
                part = slice(start, start + 4)
                assert_stored(store, shared[part], shared_values[part])
                assert store.match(own) == 4
                assert_stored(store, own, values)

        run_together(*[partial(call, n) for n in range(7)], deadline_s=self.deadline_s)

    def test_a_value_removed_beside_a_reader_is_whole_or_a_miss(
        self, store: Store, peer: Store
    ) -> None:
        [key] = fresh_keys(1)
        value = content(key, SIZE)
        done = threading.Event()

        def put_and_remove() -> None:
            try:
                for _ in range(30):
                    assert put(store, [key], [value]) == 1
                    store.remove([key])
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                found = get(peer, [key], [SIZE])
                assert_values(found, [value] * len(found))

        run_together(put_and_remove, read, deadline_s=self.deadline_s)
        assert store.match([key]) == 0

    def test_calls_after_close_raise_store_closed(self, store: Store) -> None:
        """Checks as well that a second call of `close` does nothing."""
        keys, _ = put_new(store, 1, 256)
        for _ in range(2):
            store.close()
            for call in VERBS.values():
                with pytest.raises(StoreClosed):
                    call(store, keys)
            with pytest.raises(StoreClosed):
                store.clear(secrets.token_hex(16))

    def test_a_store_that_was_never_used_closes(self, store: Store) -> None:
        run_together(store.close, deadline_s=self.deadline_s)

    def test_close_under_load_ends_and_so_do_the_calls(self, store: Store) -> None:
        calling = threading.Barrier(5)
        given_up = threading.Event()

        def call_until_closed() -> None:
            keys, values = put_new(store, 8, SMALL)
            calling.wait(self.deadline_s)
            try:
                while not given_up.is_set():
                    put(store, keys, values)
                    store.match(keys)
                    get(store, keys, [SMALL] * 8)
            except StoreError:
                with pytest.raises(StoreClosed):
                    store.match(keys)

        join = start_background(*[call_until_closed] * 4)
        calling.wait(self.deadline_s)
        try:
            run_together(store.close, deadline_s=self.deadline_s)
            join(self.deadline_s)
        finally:
            given_up.set()  # ends the threads even if the store never closes

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
    def test_a_forked_child_is_refused_and_harms_nobody(self, store: Store) -> None:
        keys, values = put_new(store, 3, SMALL)

        def is_refused() -> bool:
            with pytest.raises(StoreClosed):
                store.match(keys)
            store.close()
            return True

        assert exit_code_of(is_refused, self.deadline_s) == 0
        assert store.match(keys) == 3
        assert_stored(store, keys, values)


def _wait_for(store: Store, key: BlockKey, size: int, deadline_s: float) -> bytes:
    """Waits until a key has a value; returns it. Raises WrongLength if it is not `size` bytes."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        for value in get(store, [key], [size]):
            return value
    raise AssertionError(f"{key} did not appear within {deadline_s} s")
