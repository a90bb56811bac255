"""Client: one connection of Mooncake's library, used only while no call of it can crash or hang.

The library's object crashes the process if it is called before `setup`, during or after `close`, or
in a forked child. `setup` and `close` stop the whole process for as long as the server does not
answer. So the object is set up at its first use, and only after the server has answered. Running
calls are counted, and `close` waits for them. An object that cannot be closed is kept for ever,
because destroying it would crash or hang.

The library waits 60 s for a transfer, and then reports a failure although the transfer goes on.
Then pdstore closes the connection, which ends the transfer: its bytes would come late, into memory
that is another block's by then.
"""

# Decision: docs/decisions/029-mooncake-late-bytes.md
from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from pdstore.async_runner import AsyncRunner
from pdstore.errors import StoreTimeout, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.store.base import Lifecycle
from pdstore.store.mooncake.library import Raw, is_outage, name_of
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 0.5
DRAIN_TIMEOUT_S = 0.5
CLOSE_TIMEOUT_S = 2.0
ENDED = "transfers ended by a close"
"""The name under which `codes` counts calls that the library gave up while transfers went on."""


class Server:
    """The address of a Mooncake master; `require` tests that the master answers.

    address: `host:port`.
    """

    def __init__(self, label: str, address: str, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._where = f"{label}: the server at {address}"
        self._timeout_s = timeout_s
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)

    def require(self) -> None:
        """Raises StoreTimeout if the server hangs, StoreUnavailable if it cannot be reached.

        Sends 20 zero bytes: as long as the shortest request, but not a valid one. A server that
        works then closes the connection. If the server is suspended, its kernel accepts the
        connection, but nobody closes it.
        """
        try:
            with socket.create_connection(self._address, self._timeout_s) as connection:
                connection.settimeout(self._timeout_s)
                connection.sendall(bytes(20))
                connection.recv(1)
        except TimeoutError as error:
            message = f"{self._where} did not answer within {self._timeout_s} s"
            raise StoreTimeout(message) from error
        except ConnectionResetError:
            return  # the server closed the connection before it had read all bytes
        except OSError as error:
            raise StoreUnavailable(f"{self._where} cannot be reached: {error}") from error


class Client:
    """A connection that is made at the first call. Any thread may call it.

    label: the store's label, for messages.
    server: the server that must answer before the library is called.
    set_up: makes the library's object and connects it; returns the code of a `setup` that failed.
    before_close: called before an object that was set up is closed.
    library_timeout_s: if a call fails after this time, the library's own timeout may have ended it.
      It is a little less than the library's 60 s, because the library has another clock.
    """

    def __init__(
        self,
        label: str,
        server: Server,
        set_up: Callable[[], Raw | int],
        before_close: Callable[[], None] = lambda: None,
        library_timeout_s: float = 55.0,
    ) -> None:
        self.codes: Counter[str] = Counter()
        self._label = label
        self._server = server
        self._set_up = set_up
        self._before_close = before_close
        self._library_timeout_s = library_timeout_s
        self.lifecycle = Lifecycle(label)
        self._setting_up = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._raw: Raw | None = None
        self._suspended: Raw | None = None
        self._began: list[float] = []  # when each running call began
        self._is_suspect = False

    @property
    def rank(self) -> tuple[bool, int]:
        return self._suspended is not None, len(self._began)  # the lowest gets the next call

    @contextlib.contextmanager
    def call(self) -> Iterator[Raw]:
        """Lends the library's object for one call.

        Raises StoreClosed. If the server does not answer, raises StoreUnavailable or StoreTimeout
        within a second. Raises StoreUnavailable while given-up transfers keep the connection busy.
        """
        self.lifecycle.check()
        oldest = min(self._began, default=None)
        if self._raw is None:
            self._connect()
        elif self._is_suspect or (oldest and time.monotonic() - oldest > 1.0):
            self._server.require()  # the library might hang
            self._is_suspect = False
        with self._changed:
            self.lifecycle.check()
            if self._raw is None:
                raise StoreUnavailable(
                    f"{self._label}: an earlier call may still be under way; calls are refused"
                    " until then"
                )
            raw = self._raw
            began = time.monotonic()
            self._began.append(began)
        try:
            yield raw
        finally:
            with self._changed:
                self._began.remove(began)
                self._changed.notify_all()

    def codes_of(self, question: Callable[[Raw], list[int]]) -> list[int]:
        """Makes one call of the library; returns the call's codes and counts its errors."""
        with self.call() as raw:
            codes = question(raw)
        self.count_codes(codes)
        return codes

    def count_codes(self, codes: Sequence[int]) -> None:
        """Counts a call's error codes; after an outage, the next call first tests the server."""
        self.codes.update(name_of(code) for code in codes if code < 0)
        if any(is_outage(code) for code in codes):
            self._is_suspect = True

    def move(
        self,
        keys: Sequence[BlockKey],
        addresses: Sequence[int],
        sizes: Sequence[int],
        config: object | None,
    ) -> list[int]:
        """Moves values between the pool and memory; returns a code for each value.

        When it returns, no transfer uses the memory any more.
        config: tells the library how to keep the values of a put; None for a get.
        """
        began = time.monotonic()
        values = list(keys), list(addresses), list(sizes)
        codes: list[int]
        with self.call() as raw:
            if config is None:
                codes = raw.batch_get_into(*values)
            else:
                codes = raw.batch_put_from(*values, config)
        self.count_codes(codes)
        # library: its call times out;                          bytes of that call arrive
        # pdstore:                     gives the memory to the next job
        # So the connection is closed before this returns, which ends the call's transfer.
        if time.monotonic() - began > self._library_timeout_s and any(code < 0 for code in codes):
            self._end_transfers(raw)
        return codes

    def _end_transfers(self, raw: Raw) -> None:
        """Closes a connection with given-up transfers once no call runs and the server answers.

        Until the close, calls are refused. The first call after it makes a new connection.
        """
        log.warning("%s: a call was given up and may be under way: it is ended", self._label)
        self.codes[ENDED] += 1
        with self._changed:
            if self._raw is raw:
                self._raw = None
                self._suspended = raw
            self._changed.wait_for(lambda: not (self._suspended is raw and self._began))
        while self._hangs():
            continue
        with self._changed:
            if self._suspended is not raw:  # another call has closed the connection
                return
            self._close_raw(raw)
            self._suspended = None
            self._changed.notify_all()

    def close(self, drain_s: float = DRAIN_TIMEOUT_S, close_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for running calls, then closes the library's object. May be called twice.

        Ends within `close_s`, unless the library keeps the GIL for longer. If calls still run
        or the server hangs, closing the object would hang, too: then it is kept for ever. An object
        that waits for `_end_transfers` is closed there.
        """
        if not self.lifecycle.end():
            return
        closed = Deadline(close_s)
        with self._changed:
            is_idle = self._changed.wait_for(lambda: not self._began or self._suspended, drain_s)
            raw, self._raw = self._raw, None
        if raw is None:
            return
        if is_idle and not closed.is_over() and not self._hangs():
            self._close_raw(raw, closed.remaining_s())
        else:
            log.warning(
                "%s: calls still run, or the server hangs; the connection is left open", self._label
            )
            _aside.append(raw)

    def _hangs(self) -> bool:
        """True if the server hangs, as a close then would; takes half a second to find out."""
        try:
            self._server.require()
        except (StoreTimeout, StoreUnavailable) as error:
            return isinstance(error, StoreTimeout)
        return False

    def _close_raw(self, raw: Raw, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Closes an object; keeps it for ever if the close does not end within `timeout_s`."""
        self._before_close()
        try:
            closer: AsyncRunner[int] = AsyncRunner("pdstore-mooncake-close")
        except RuntimeError:  # no thread can start: at exit, from Python 3.12 on
            raw.close()
            return
        closer.launch(raw.close)
        try:
            closer.sync(timeout_s)
        except TimeoutError:
            log.warning("%s: close did not end within %.1f s; left alone", self._label, timeout_s)
            _aside.append(raw)
        closer.close(0.1)

    def _connect(self) -> None:
        if not self._setting_up.acquire(timeout=30.0):
            raise StoreTimeout(f"{self._label}: another thread is still connecting")
        try:
            if self._suspended is not None or self._raw is not None:
                return
            self._server.require()
            _clients.add(self)
            _set_hooks()
            raw = self._set_up()
            if isinstance(raw, int):
                raise StoreUnavailable(f"{self._label}: setup failed: {name_of(raw)}")
            self._is_suspect = False
            with self._changed:
                if not self.lifecycle.is_closed:
                    self._raw = raw
                    return
            self._close_raw(raw)
        finally:
            self._setting_up.release()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_aside: list[Raw | Client] = []
"""Objects that must not be closed: destroying one would crash or hang the process."""


def close_together(
    clients: Sequence[Client], drain_s: float = DRAIN_TIMEOUT_S, close_s: float = CLOSE_TIMEOUT_S
) -> None:
    """Closes clients; after `close_s` the rest stays open. Their running calls share `drain_s`.

    First, every client refuses new calls. Otherwise some clients would begin new calls while this
    function waits for others, and no time would be left to wait for the new calls.
    """
    for client in clients:
        client.lifecycle.refuse()
    drained = Deadline(drain_s)
    closed = Deadline(close_s)
    for client in clients:
        client.close(drained.remaining_s(), closed.remaining_s())


def close_on_sigterm() -> None:
    """Makes SIGTERM close all clients and then end the process as before.

    For a process that lends memory: if such a process ends without closing, the master sends other
    clients to it until the process's time to live is over. Does nothing outside the main thread, or
    if the program has its own handler, which must then close the stores.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


@functools.cache
def _set_hooks() -> None:
    """Makes the interpreter close all clients at its exit, before the library's own exit code."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=lambda: _aside.extend(list(_clients)))


def _close_all() -> None:
    close_together(list(_clients), 1.0, 10.0)  # takes seconds if much memory is lent


def _end(number: int, frame: object) -> None:
    """Closes all clients at a signal; then the signal ends the process as if it had no handler."""
    signal.signal(number, signal.SIG_DFL)
    start = time.monotonic()
    _close_all()
    log.info("closed in %.1f s on signal %d", time.monotonic() - start, number)
    os.kill(os.getpid(), number)
