"""Gate: stands between an instance and redis, as a gate, a virtual address or a middlebox."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

LOAD = re.compile(rb"GET\r\n\$\d+\r\n(pds1:[0-9a-f]{32}:\d[^\r]+)\r\n")
SAVE = re.compile(rb"SET\r\n\$\d+\r\n(pds1:[0-9a-f]{32}:\d[^\r]+)\r\n")
"""A command that reads or writes a block, not a marker; its group is the key."""


class Gate:
    """A TCP relay to redis that can hold the connections on which a command comes.

    It can also send new connections elsewhere, as an address does after a failover, and forget the
    connections that it has, as a middlebox does with idle ones.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._command: re.Pattern[bytes] | None = None
        self._sockets: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="gate", daemon=True)]
        self._threads[0].start()
        self.held: list[str] = []
        """Keys of the commands that are held, in their order."""

    def hold(self, command: re.Pattern[bytes]) -> None:
        """Holds each connection from the first such command on it."""
        self.held, self._command = [], command
        self._open.clear()

    def release(self) -> None:
        """Lets everything pass."""
        self._command = None
        self._open.set()

    def lead_to(self, port: int) -> None:
        """Sends new connections to another server; the present ones stay where they are."""
        self._port = port

    def forget(self) -> int:
        """Lets nothing pass on the present connections, and tells nobody; returns how many."""
        before = len(self._forgotten)
        self._forgotten.update(self._sockets)
        return (len(self._forgotten) - before) // 2

    @property
    def num_accepted(self) -> int:
        """The number of connections so far."""
        return len(self._sockets) // 2

    def close(self) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            _end(each)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    _end(client)
                    continue
                self._sockets.append(server)
                for pair in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._relay, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if self._command is not None and (keys := self._command.findall(data)):
                    self.held += [key.decode() for key in keys]
                    self._open.wait()
                if source not in self._forgotten:
                    target.sendall(data)
        _end(source)
        _end(target)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
