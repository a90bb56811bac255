"""A server is asked whether it lives, without the library."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pdstore.errors import StoreTimeout, StoreUnavailable
from pdstore.store.mooncake.server import Server, State
from pdstore.testing.threads import start_background


@contextlib.contextmanager
def listening(*, answers: bool) -> Iterator[str]:
    """The address of a server that accepts connections, and closes them or does nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not answers:
            yield address
            return
        server.settimeout(0.05)
        is_over = threading.Event()

        def hang_up():
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        join = start_background(hang_up)
        yield address
        is_over.set()
        join(5)


def test_a_server_that_hangs_up_answers():
    with listening(answers=True) as address:
        server = Server("x", address)
        assert server.ask() is State.ANSWERS
        server.require()


def test_a_server_that_only_accepts_hangs_and_costs_its_time_out():
    """A stopped process still accepts connections."""
    with listening(answers=False) as address:
        server = Server("x", address, timeout_s=0.1)
        assert server.ask() is State.HANGS
        start = time.monotonic()
        with pytest.raises(StoreTimeout, match=f"{address} did not answer within 0.1 s"):
            server.require()
        assert 0.05 < time.monotonic() - start < 1


def test_nobody_at_an_address_is_a_process_that_ended():
    with listening(answers=False) as address:
        pass
    server = Server("x", address)
    assert server.ask() is State.GONE
    with pytest.raises(StoreUnavailable, match=f"{address} cannot be reached"):
        server.require()


def test_a_name_that_means_nothing_says_nothing_about_a_process():
    assert Server("x", "no.such.host.invalid:1").ask() is State.UNREACHABLE


@pytest.mark.parametrize("address", ["etcd://a:1;b:2", "10.0.0.1", "host:port"])
def test_what_is_no_single_address_is_taken_to_answer(address):
    Server("x", address).require()
