"""Client: one connection of Mooncake's library, used only while that is safe.

The library's object crashes the process when it is called before `setup`, after `close` or during
it, and in a forked child; and `setup` stops the whole process for as long as the master does not
answer. So: it is set up at first use, after the master was seen to answer; calls are counted, and
`close` waits for them; an object that cannot be closed is set aside, never destroyed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Protocol

from pdstore.async_runner import AsyncRunner
from pdstore.errors import StoreError, StoreTimeout, StoreUnavailable
from pdstore.store.base import Lifecycle
from pdstore.store.mooncake.codes import is_outage, name_of

log = logging.getLogger(__name__)

PROBE_S = 0.5
DRAIN_S = 5.0
_CLOSE_S = 5.0
_SET_UP_S = 30.0  # how long a call waits for another thread's `setup`
_PROBE_BYTES = bytes(20)  # as long as the shortest request, and none: a live server hangs up


class Raw(Protocol):
    """What pdstore uses of the library's MooncakeDistributedStore; a negative result is a code."""

    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object
    ) -> list[int]: ...
    def batch_get_into(
        self, keys: list[str], addresses: list[int], sizes: list[int]
    ) -> list[int]: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def remove_by_regex(self, pattern: str, force: bool) -> int: ...
    def get_size(self, key: str) -> int: ...
    def register_buffer(self, address: int, size: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def close(self) -> int: ...


class Client:
    """A connection that makes itself at its first call and ends once. Any thread may call it.

    label: of the store, for messages.
    address: (host, port) of the server that must answer before the library may be called; None
      when there is no one address (a cluster of masters).
    set_up: makes the object and connects it; the code of the library's `setup` if that failed.
    """

    def __init__(
        self,
        label: str,
        address: tuple[str, int] | None,
        set_up: Callable[[], Raw | int],
    ) -> None:
        self._label, self._address, self._set_up = label, address, set_up
        self._lifecycle = Lifecycle(label)
        self._changed = threading.Condition()  # guards the raw object and the count of calls
        self._setting_up = threading.Lock()
        self._raw: Raw | None = None
        self._num_calls = 0
        self._is_suspect = False
        self.codes: Counter[str] = Counter()
        _ALL.add(self)

    @property
    def is_connected(self) -> bool:
        return self._raw is not None and not self._lifecycle.is_closed

    @contextlib.contextmanager
    def call(self) -> Iterator[Raw]:
        """The library's object, for one call. Raises StoreClosed; StoreUnavailable or StoreTimeout,
        within PROBE_S, when the server does not answer.
        """
        raw = self._enter()
        try:
            yield raw
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def note(self, codes: Sequence[int]) -> None:
        """Counts the codes of a call; after an outage the next call asks the server first."""
        self.codes.update(name_of(code) for code in codes if code < 0)
        if any(is_outage(code) for code in codes):
            self._is_suspect = True

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Waits for running calls, then closes the library's object. Twice is fine."""
        if not self._lifecycle.end():
            return
        with self._changed:
            is_idle = self._changed.wait_for(lambda: self._num_calls == 0, drain_s)
            raw, self._raw = self._raw, None
        if raw is None:
            return
        if not is_idle:
            log.warning("%s: calls still run at close; the connection is left open", self._label)
            _SET_ASIDE.append(raw)
            return
        _close_in_time(raw, self._label)

    def _enter(self) -> Raw:
        self._lifecycle.check()
        if self._raw is None:
            self._connect()
        elif self._is_suspect:
            self._probe()
            self._is_suspect = False
        with self._changed:
            self._lifecycle.check()
            assert self._raw is not None, "set until the end of this life"
            self._num_calls += 1
            return self._raw

    def _connect(self) -> None:
        if not self._setting_up.acquire(timeout=_SET_UP_S):
            raise StoreTimeout(f"{self._label}: another thread is still connecting")
        try:
            if self._raw is not None:
                return
            self._probe()
            _close_at_exit()
            raw = self._set_up()
            if isinstance(raw, int):
                raise StoreUnavailable(f"{self._label}: setup failed: {name_of(raw)}")
            self._is_suspect = False
            with self._changed:
                if not self._lifecycle.is_closed:
                    self._raw = raw
                    return
            _close_in_time(raw, self._label)
            self._lifecycle.check()
        finally:
            self._setting_up.release()

    def _probe(self) -> None:
        """Raises unless the server at the address answers: hangs up on 20 bytes that mean nothing.

        A stopped process still accepts connections, so being connected says nothing.
        """
        if self._address is None:
            return
        where = f"{self._label}: the server at {self._address[0]}:{self._address[1]}"
        try:
            with socket.create_connection(self._address, PROBE_S) as connection:
                connection.settimeout(PROBE_S)
                connection.sendall(_PROBE_BYTES)
                connection.recv(1)
        except TimeoutError as error:
            raise StoreTimeout(f"{where} did not answer within {PROBE_S} s") from error
        except ConnectionResetError:
            return  # it hung up before it had read all
        except OSError as error:
            raise StoreUnavailable(f"{where} is not there: {error}") from error

    def _set_aside(self) -> None:
        """In the child of a fork: the object stays, untouched, until the child's end."""
        if self._raw is not None:
            _SET_ASIDE.append(self._raw)


_ALL: weakref.WeakSet[Client] = weakref.WeakSet()
_SET_ASIDE: list[Raw] = []
_hooks_lock = threading.Lock()
_hooks_are_set = False


def _close_in_time(raw: Raw, label: str) -> None:
    closer: AsyncRunner[int] = AsyncRunner("pdstore-mooncake-close")
    closer.launch(raw.close)
    try:
        closer.sync(_CLOSE_S)
    except TimeoutError:
        log.warning("%s: close did not end within %s s; left alone", label, _CLOSE_S)
        _SET_ASIDE.append(raw)
    closer.close(0.1)


def _close_at_exit() -> None:
    """What is connected is closed before the interpreter goes, and set aside in forked children."""
    global _hooks_are_set
    with _hooks_lock:
        if _hooks_are_set:
            return
        _hooks_are_set = True
    atexit.register(_close_all, 1.0)
    os.register_at_fork(after_in_child=_set_all_aside)


def _close_all(drain_s: float) -> None:
    for client in list(_ALL):
        with contextlib.suppress(StoreError):
            client.close(drain_s)


def _set_all_aside() -> None:
    for client in list(_ALL):
        client._set_aside()


def close_on_sigterm() -> None:
    """Makes SIGTERM close all clients and then end the process as before.

    For a process that lends memory: killed without a word, the master sends others to it until the
    client's time to live is over. Nothing is changed where the program has a handler of its own (it
    closes what it opened), nor outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    start = time.monotonic()
    _close_all(1.0)
    log.info("closed in %.1f s on signal %d", time.monotonic() - start, number)
    os.kill(os.getpid(), number)
