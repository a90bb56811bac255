"""Ports for servers that are started on this host."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that Linux gives to outgoing connections: between two starts of a server nobody takes
# its port but a second server. Not the seeded generator: two processes must not draw alike.
_CANDIDATES = range(20_000, 30_000)
_draw = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Returns different ports of 127.0.0.1 on which nobody listens."""
    free: list[int] = []
    for port in _draw.sample(_CANDIDATES, len(_CANDIDATES)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            break
    return free


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nobody listens."""
    return free_ports(1)[0]
