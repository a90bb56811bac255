"""TimedReader: a deadline for all bytes together, and a socket that stays open."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from pdstore.status.server import TimedReader


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


def test_bytes_that_come_now_and_then_do_not_prolong_it(pair):
    ours, theirs = pair
    stopped = threading.Event()

    def trickle():
        while not stopped.wait(0.02):
            theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    begin = time.monotonic()
    try:
        with TimedReader(ours, 0.3) as reader, pytest.raises(TimeoutError):
            reader.readall()
    finally:
        stopped.set()
        thread.join()
    assert 0.3 <= time.monotonic() - begin < 20


def test_nothing_at_all_ends_it_too(pair):
    with TimedReader(pair[0], 0.05) as reader, pytest.raises(TimeoutError):
        reader.read(1)


def test_it_keeps_the_socket_open_and_ends_with_the_stream(pair):
    ours, theirs = pair
    with TimedReader(ours, 10.0) as reader:
        ours.close()
        theirs.sendall(b"whole")
        theirs.shutdown(socket.SHUT_WR)
        assert reader.readall() == b"whole"
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.sendall(b"more")
