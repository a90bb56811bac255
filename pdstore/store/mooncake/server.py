"""Server: the process at an address, asked whether it lives without a call of the library."""

from __future__ import annotations

import enum
import socket

from pdstore.errors import StoreTimeout, StoreUnavailable

PROBE_S = 0.5
_PROBE_BYTES = bytes(20)  # as long as the shortest request but not one, so a server hangs up


class State(enum.Enum):
    """Answer of a server, or its absence."""

    ANSWERS = "answers"
    HANGS = "hangs"
    GONE = "gone"
    """Nobody listens at its address: the process has ended, and its memory with it."""
    UNREACHABLE = "unreachable"


class Server:
    """A master, or the `mooncake_client` that shares its memory with this host's processes.

    address: `host:port`; anything else (`etcd://...`) has no one address and always answers.
    """

    def __init__(self, label: str, address: str, timeout_s: float = PROBE_S) -> None:
        self._label, self._timeout_s = label, timeout_s
        self._address = _parse(address)

    def ask(self) -> State:
        """Returns the server's state, within twice the time-out."""
        return self._ask()[0]

    def require(self) -> None:
        """Raises StoreTimeout if the server hangs, StoreUnavailable if it cannot be reached."""
        state, why = self._ask()
        if state is State.ANSWERS:
            return
        assert self._address is not None
        where = f"{self._label}: the server at {self._address[0]}:{self._address[1]}"
        if state is State.HANGS:
            raise StoreTimeout(f"{where} did not answer within {self._timeout_s} s") from why
        raise StoreUnavailable(f"{where} cannot be reached: {why}") from why

    def _ask(self) -> tuple[State, OSError | None]:
        """Sends 20 junk bytes; a live server closes the connection.

        A stopped process still accepts connections, so being connected says nothing.
        """
        if self._address is None:
            return State.ANSWERS, None
        try:
            with socket.create_connection(self._address, self._timeout_s) as connection:
                connection.settimeout(self._timeout_s)
                connection.sendall(_PROBE_BYTES)
                connection.recv(1)
        except TimeoutError as error:
            return State.HANGS, error
        except ConnectionRefusedError as error:
            return State.GONE, error
        except ConnectionResetError:
            return State.ANSWERS, None  # it hung up before it had read all
        except OSError as error:
            return State.UNREACHABLE, error
        return State.ANSWERS, None


def _parse(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    if "://" in text or not port.isdigit():
        return None
    return host.strip("[]"), int(port)
