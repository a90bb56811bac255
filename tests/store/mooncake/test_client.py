"""A connection of the library, used only while that is safe: rules 7 and 8."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from pdstore.errors import StoreClosed, StoreTimeout, StoreUnavailable
from pdstore.store.mooncake.client import Client, Server, State, close_together
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, run_together, start_background
from tests.support.kv import eventually
from tests.support.mooncake_double import RawDouble


@pytest.fixture
def open_client(server):
    """Opens clients whose objects are the given ones, or codes, one after the other."""
    with contextlib.ExitStack() as stack:

        def make(*objects):
            left = list(objects)
            return stack.enter_context(contextlib.closing(Client("x", server, lambda: left.pop(0))))

        yield make


def test_a_server_that_hangs_up_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        join = start_background(lambda: listener.accept()[0].close())
        assert Server("x", address).ask() is State.ANSWERS
        join(5)


def test_a_server_that_only_accepts_hangs_and_costs_its_time_out():
    """A stopped process still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = Server("x", address, timeout_s=0.1)
        assert server.ask() is State.HANGS
        start = time.monotonic()
        with pytest.raises(StoreTimeout, match=f"{address} did not answer within 0.1 s"):
            server.require()
        assert 0.05 < time.monotonic() - start < 1
    assert server.ask() is State.GONE
    with pytest.raises(StoreUnavailable, match=f"{address} cannot be reached"):
        server.require()


@pytest.mark.parametrize("state", [State.HANGS, State.GONE, State.UNREACHABLE])
def test_the_library_is_not_set_up_before_the_server_answers(open_client, server, raw, state):
    """Rule 7: setup would stop the whole process."""
    client = open_client(-1, raw)
    server.state = state
    with pytest.raises(StoreUnavailable, match="away"), client.call():
        pass
    server.state = State.ANSWERS
    with pytest.raises(StoreUnavailable, match="setup failed"), client.call():
        pass
    for _ in range(3):
        with client.call() as lent:
            assert lent is raw


def test_close_waits_for_the_calls_that_run(store, raw):
    """Rule 8: a close during a call crashes the library."""
    store.match(fresh_keys(1))
    raw.gate.clear()

    def let_go():
        eventually(lambda: raw.count("exist") == 2)
        time.sleep(0.05)
        assert not raw.is_closed
        raw.gate.set()

    join = start_background(lambda: store.match(fresh_keys(1)), let_go)
    eventually(lambda: raw.count("exist") == 2)
    run_together(store.close)
    join(10)
    assert raw.is_closed
    with pytest.raises(StoreClosed):
        store.match(fresh_keys(1))


def test_clients_have_one_time_to_drain_and_accept_no_calls_in_it(open_client, raw):
    """Rule 8: a call that never ends uses it up, and its object is left alone; others close."""
    other = RawDouble()
    hung, busy = open_client(raw), open_client(other)
    is_busy = threading.Event()

    def call_on():
        with contextlib.suppress(StoreClosed):
            while True:
                with busy.call():
                    is_busy.set()
                    time.sleep(0.02)

    with hung.call():
        join = start_background(call_on)
        assert is_busy.wait(30)
        begin = time.monotonic()
        close_together([hung, busy], drain_s=0.2)
        assert time.monotonic() - begin < 5
        assert other.is_closed
        assert not raw.is_closed
    join(30)
    with pytest.raises(StoreClosed), hung.call():
        pass


def test_a_forked_child_neither_calls_nor_closes_the_parents_object(store, raw):
    """Rule 8."""
    get(store, fresh_keys(1), [1])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.match(fresh_keys(1))
        except StoreClosed:
            store.close()
            store.allocate(1 << 20)
            is_left_alone = not raw.is_closed and len(raw.calls) == 1 and raw.buffers == []
            os.write(writer, b"refused" if is_left_alone else b"no")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"refused"
    os.close(reader)
    os.close(writer)
