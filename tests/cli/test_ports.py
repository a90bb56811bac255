from __future__ import annotations

import socket

import pytest

from pdstore.cli.ports import free_port, free_ports


def test_they_are_different() -> None:
    assert len(set(free_ports(8))) == 8


def test_a_taken_one_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port()
        assert free_ports(1, [port, other]) == [other]
        with pytest.raises(OSError, match="fewer than 2 free ports"):
            free_ports(2, [port, other])
