"""Several callers at once, and the end of a store: close, twice, under load, in a forked child."""

from __future__ import annotations

import os
import threading
import time
import warnings
from functools import partial
from typing import ClassVar

import pytest

from pdstore.errors import StoreClosed, StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.testing.suite.calls import Verb, every_verb
from pdstore.testing.values import (
    assert_values,
    content,
    fresh_keys,
    get,
    put,
    run_together,
    start_background,
    stored,
)

SIZE = 64 << 10
SMALL = 4096


class ConcurrencyTests:
    """A value appears whole or not at all, and calls do not mix.

    A store ends when it is told to, in bounded time, and only in its own process.
    """

    deadline_s: ClassVar[float] = 30.0

    def test_a_value_appears_whole_or_not_at_all(self, store: Store, peer: Store) -> None:
        keys = fresh_keys(30)
        values = [content(key, 4 * SIZE) for key in keys]

        def write() -> None:
            for key, value in zip(keys, values, strict=True):
                put(store, [key], [value])

        def read() -> None:
            for key, value in zip(keys, values, strict=True):
                found = _wait_for(peer, key, len(value), self.deadline_s)
                assert_values([found], [value])

        run_together(write, read, read, deadline_s=self.deadline_s)

    def test_what_match_found_can_be_read(self, store: Store, peer: Store) -> None:
        keys = fresh_keys(30)
        values = [content(key, SIZE) for key in keys]

        def write() -> None:
            for start in range(0, 30, 5):
                put(store, keys[start : start + 5], values[start : start + 5])

        def read() -> None:
            end, n = time.monotonic() + self.deadline_s, 0
            while n < len(keys) and time.monotonic() < end:
                n = peer.match(keys)
                assert_values(get(peer, keys[:n], [SIZE] * n), values[:n])
            assert n == len(keys)

        run_together(write, read, deadline_s=self.deadline_s)

    def test_two_writers_of_one_key_are_not_mixed(self, store: Store, peer: Store) -> None:
        for [key] in (fresh_keys(1) for _ in range(20)):
            versions = [content(key, SIZE, version) for version in (0, 1)]
            seen = self._race(key, (store, versions[0]), (peer, versions[1]))
            seen += get(store, [key], [SIZE]) + get(peer, [key], [SIZE])
            assert len(seen) == 3
            assert_values(seen, [versions[seen[0] == versions[1]]] * 3)

    def test_many_threads_get_what_they_ask_for(self, store: Store) -> None:
        shared, contents = stored(store, 16, SIZE)

        def call(first: int) -> None:
            for round_ in range(6):
                own, values = stored(store, 4, SIZE)
                part = slice((first + round_) % 12, (first + round_) % 12 + 4)
                assert_values(get(store, shared[part], [SIZE] * 4), contents[part])
                assert store.match(own) == 4
                assert_values(get(store, own, [SIZE] * 4), values)

        run_together(
            *[partial(call, first) for first in range(8)],
            deadline_s=self.deadline_s,
        )

    def test_a_value_removed_beside_a_reader_is_whole_or_a_miss(
        self, store: Store, peer: Store
    ) -> None:
        [key] = fresh_keys(1)
        value, done = content(key, SIZE), threading.Event()

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

    @every_verb
    def test_calls_after_close_raise_store_closed(self, store: Store, verb: Verb) -> None:
        keys = fresh_keys(1)
        put(store, keys, [b"x" * 256])
        store.close()
        with pytest.raises(StoreClosed):
            verb(store, keys)

    def test_a_store_that_was_never_used_closes_and_twice_is_fine(self, store: Store) -> None:
        for _ in range(2):
            run_together(store.close, deadline_s=self.deadline_s)

    def test_close_under_load_ends_and_so_do_the_calls(self, store: Store) -> None:
        calling, given_up = threading.Barrier(5), threading.Event()

        def call_until_closed() -> None:
            keys, values = stored(store, 8, SMALL)
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
            given_up.set()  # a store that never closes would keep a core busy until Python ends

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
    def test_a_forked_child_is_refused_and_harms_nobody(self, store: Store) -> None:
        keys, values = stored(store, 3, SMALL)
        with warnings.catch_warnings():
            # Python warns of a fork beside threads, which is what this test is about
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _exit_with_outcome(store)
        assert _exit_code(child, self.deadline_s) == 0, "the child's call must raise StoreClosed"
        assert store.match(keys) == 3
        assert_values(get(store, keys, [SMALL] * 3), values)

    def _race(self, key: BlockKey, *writers: tuple[Store, bytes]) -> list[bytes]:
        """Puts one key from several stores at once; returns what a reader saw first."""
        start, seen = threading.Barrier(len(writers) + 1), list[bytes]()

        def write(store: Store, value: bytes) -> None:
            start.wait(self.deadline_s)
            assert put(store, [key], [value]) == 1

        def read() -> None:
            start.wait(self.deadline_s)
            seen.append(_wait_for(writers[0][0], key, SIZE, self.deadline_s))

        run_together(
            *[partial(write, *writer) for writer in writers], read, deadline_s=self.deadline_s
        )
        return seen


def _wait_for(store: Store, key: BlockKey, size: int, deadline_s: float) -> bytes:
    """Waits for a key's value, and returns it. WrongLength says that it was not whole."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        for value in get(store, [key], [size]):
            return value
    raise AssertionError(f"{key} did not appear within {deadline_s} s")


def _exit_with_outcome(store: Store) -> None:
    code = 1
    try:
        store.match(fresh_keys(1))
        code = 2
    except StoreClosed:
        store.close()
        code = 0
    finally:
        os._exit(code)


def _exit_code(child: int, deadline_s: float) -> int:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError(f"the forked child hangs: it still runs after {deadline_s} s")
