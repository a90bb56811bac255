"""Ports for servers that are started on this host."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence

# Below those that Linux gives to outgoing connections: between two starts of a server, and while a
# slow one starts, nobody takes its port but a second server that was told to listen there.
_CANDIDATES = range(20_000, 30_000)
_draw = random.SystemRandom()  # not the seeded generator: two processes must not draw alike


def free_ports(count: int, candidates: Sequence[int] = _CANDIDATES) -> list[int]:
    """Returns different ports of 127.0.0.1 on which nobody listens. Raises OSError with too few."""
    free: list[int] = []
    for port in _draw.sample(candidates, len(candidates)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"127.0.0.1 has fewer than {count} free ports in {candidates}")


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nobody listens. Raises OSError without one."""
    [port] = free_ports(1)
    return port
