"""The end of a store: close, twice, under load, and in a forked child."""

from __future__ import annotations

import os
import threading
import time
import warnings
from typing import ClassVar

import pytest

from pdstore.errors import StoreClosed, StoreError
from pdstore.store.base import Store
from pdstore.testing.suite.prefixes import Verb, every_verb
from pdstore.testing.threads import run_together, start_background
from pdstore.testing.values import assert_values, content, fresh_keys, get, put

SIZE = 4096


class LifeTests:
    """A store ends when it is told to, in bounded time, and only in its own process."""

    deadline_s: ClassVar[float] = 30.0

    @every_verb
    def test_calls_after_close_raise_store_closed(self, store: Store, verb: Verb) -> None:
        keys = fresh_keys(1)
        put(store, keys, [b"x" * 256])
        store.close()
        with pytest.raises(StoreClosed):
            verb(store, keys)

    def test_close_twice_is_fine(self, store: Store) -> None:
        store.match(fresh_keys(1))
        store.close()
        store.close()

    def test_a_store_that_was_never_used_closes(self, store: Store) -> None:
        run_together(store.close, deadline_s=self.deadline_s)

    def test_close_under_load_ends_and_so_do_the_calls(self, store: Store) -> None:
        calling, given_up = threading.Barrier(5), threading.Event()

        def call_until_closed() -> None:
            keys = fresh_keys(8)
            values = [content(key, SIZE) for key in keys]
            put(store, keys, values)
            calling.wait(self.deadline_s)
            try:
                while not given_up.is_set():
                    put(store, keys, values)
                    store.match(keys)
                    get(store, keys, [SIZE] * 8)
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
        keys = fresh_keys(3)
        values = [content(key, SIZE) for key in keys]
        put(store, keys, values)
        with warnings.catch_warnings():
            # Python warns of a fork beside threads, which is what this test is about
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _exit_with_outcome(store)
        assert _exit_code(child, self.deadline_s) == 0, "the child's call must raise StoreClosed"
        assert store.match(keys) == 3
        assert_values(get(store, keys, [SIZE] * 3), values)


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
