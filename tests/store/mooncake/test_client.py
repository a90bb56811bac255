"""A connection of the library, used only while that is safe: rules 7 and 8."""

from __future__ import annotations

import socket
import time

import pytest

from pdstore.errors import StoreClosed, StoreTimeout, StoreUnavailable
from pdstore.store.mooncake.client import ENDED, Client, Server
from pdstore.testing import fresh_keys
from pdstore.testing.values import run_together, start_background
from tests.support.kv import eventually
from tests.support.mooncake_double import RawDouble


@pytest.fixture
def open_client(server, closed_after):
    """Opens clients whose objects are the given ones, or codes, one after the other."""

    def make(*raws, **options):
        left = list(raws)
        return closed_after(Client("x", server, lambda: left.pop(0), **options))

    return make


def test_a_server_that_hangs_up_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        join = start_background(lambda: listener.accept()[0].close())
        Server("x", address).require()
        join(5)


def test_a_server_that_only_accepts_hangs_and_costs_its_time_out():
    """A stopped process still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = Server("x", address, timeout_s=0.1)
        start = time.monotonic()
        with pytest.raises(StoreTimeout, match=f"{address} did not answer within 0.1 s"):
            server.require()
        assert 0.05 < time.monotonic() - start < 1
    with pytest.raises(StoreUnavailable, match=f"{address} cannot be reached"):
        server.require()


def test_the_library_is_not_set_up_before_the_server_answers(open_client, server, raw):
    """Rule 7: setup would stop the whole process."""
    client = open_client(-1, raw)
    server.problem = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable, match="away"), client.call():
        pass
    server.problem = None
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


def test_a_server_that_hangs_at_the_close_leaves_the_connection_open(open_client, server, raw):
    """Rule 8: the library's close would wait for it, and keep every thread waiting."""
    client = open_client(raw)
    with client.call():
        pass
    server.problem = StoreTimeout("hangs")
    client.close()
    assert not raw.is_closed


def test_a_transfer_that_the_library_gave_up_ends_with_its_connection(open_client, raw):
    """Rule 13, as soon as no other call runs on it; calls are refused until then."""
    other, keys = RawDouble(), fresh_keys(1)
    client = open_client(raw, other, library_timeout_s=-1.0)
    raw.script, raw.values = [("get", [-800])], {keys[0]: 8}
    with client.call():
        join = start_background(lambda: client.move(keys, [0], [8], None))
        eventually(lambda: client.codes[ENDED])
        with pytest.raises(StoreUnavailable, match="under way"), client.call():
            pass
        assert not raw.is_closed
    join(5)
    assert raw.is_closed
    with client.call() as lent:
        assert lent is other
