"""Client: one connection of Mooncake's library, used only while that is safe.

The library's object crashes the process when it is called before `setup`, after `close` or during
it, and in a forked child; `setup` and `close` stop the whole process for as long as the server does
not answer. So the object is set up at first use, after the server was seen to answer; calls are
counted, and `close` waits for them; an object that cannot be closed is set aside, never destroyed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pdstore.errors import StoreTimeout, StoreUnavailable
from pdstore.store.base import Lifecycle
from pdstore.store.mooncake.closing import CLOSE_S, DRAIN_S, close_at_exit, close_in_time, set_aside
from pdstore.store.mooncake.codes import is_outage, name_of
from pdstore.store.mooncake.server import Server, State
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

_SET_UP_S = 30.0  # how long a call waits for another thread's `setup`
_SLOW_CALL_S = 1.0


class Raw(Protocol):
    """The part of the library's MooncakeDistributedStore that pdstore uses.

    A negative result is a code. All but `close` let other Python threads run.
    """

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
    def health_check(self) -> int: ...
    def close(self) -> int: ...


class Client:
    """A connection that is made at the first call and ends once. Any thread may call it.

    label: of the store, for messages.
    server: must answer before the library is called.
    set_up: makes the object and connects it; returns the code of the library's `setup` if that
      failed.
    """

    def __init__(self, label: str, server: Server, set_up: Callable[[], Raw | int]) -> None:
        self._label, self._server, self._set_up = label, server, set_up
        self._lifecycle = Lifecycle(label)
        self._changed = threading.Condition()  # guards what follows
        self._raw: Raw | None = None
        self._suspended: Raw | None = None
        self._began: list[float] = []  # when each running call began
        self._is_suspect = False
        self._setting_up = threading.Lock()
        self.codes: Counter[str] = Counter()

    @property
    def is_connected(self) -> bool:
        return self._raw is not None and not self._lifecycle.is_closed

    @property
    def is_idle(self) -> bool:
        """True if no call of the library is running."""
        return not self._began

    @property
    def num_running(self) -> int:
        """Returns how many calls of the library are running."""
        return len(self._began)

    @contextlib.contextmanager
    def call(self) -> Iterator[Raw]:
        """Lends the library's object for one call.

        Raises StoreClosed; StoreUnavailable or StoreTimeout, within a second, when the server does
        not answer, and StoreUnavailable while the connection is suspended.
        """
        raw, began = self._enter()
        try:
            yield raw
        finally:
            with self._changed:
                self._began.remove(began)
                self._changed.notify_all()

    def note(self, codes: Sequence[int]) -> None:
        """Counts the codes of a call; after an outage the next call asks the server first."""
        self.codes.update(name_of(code) for code in codes if code < 0)
        if any(is_outage(code) for code in codes):
            self._is_suspect = True

    def suspend(self, raw: Raw) -> None:
        """Refuses calls from now on, until `restore` or `replace`; those that run go on."""
        with self._changed:
            if self._raw is raw:
                self._raw, self._suspended = None, raw

    def is_suspended(self, raw: Raw) -> bool:
        return self._suspended is raw

    def restore(self, raw: Raw) -> None:
        """Lets calls use a suspended object again."""
        with self._changed:
            self._suspended = None
            if not self._lifecycle.is_closed:
                self._raw = raw
                return
        set_aside(raw)

    def replace(self, raw: Raw) -> None:
        """Closes a suspended object that nobody calls; the next call makes another."""
        close_in_time(raw, self._label)
        with self._changed:
            self._suspended = None

    def refuse(self) -> None:
        """Refuses calls from now on; those that run go on, and `close` waits for them."""
        self._lifecycle.refuse()

    def close(self, drain_s: float = DRAIN_S, close_s: float = CLOSE_S) -> None:
        """Waits for running calls, then closes the library's object. Twice is fine.

        It takes `close_s` in all, unless the library keeps Python's lock for longer. The object is
        set aside where closing it would hang: calls still run, or the server does not answer. A
        suspended object is left to the call that suspended it.
        """
        if not self._lifecycle.end():
            return
        closed = Deadline(close_s)
        with self._changed:
            is_idle = self._changed.wait_for(
                lambda: self.is_idle or self._suspended is not None, drain_s
            )
            raw, self._raw = self._raw, None
        if raw is None:
            return
        if not is_idle:
            log.warning("%s: calls still run at close; the connection is left open", self._label)
            set_aside(raw)
        elif self._server.ask() is State.HANGS:
            log.warning("%s: the server hangs; the connection is left open", self._label)
            set_aside(raw)
        else:
            close_in_time(raw, self._label, closed.remaining_s())

    def set_aside(self) -> None:
        """Keeps the object, untouched, until this forked child ends."""
        for raw in (self._raw, self._suspended):
            if raw is not None:
                set_aside(raw)

    def _enter(self) -> tuple[Raw, float]:
        self._lifecycle.check()
        if self._raw is None:
            self._connect()
        elif self._is_suspect or self._is_slow():
            self._server.require()
            self._is_suspect = False
        with self._changed:
            self._lifecycle.check()
            if self._raw is None:
                raise self._refusal()
            now = time.monotonic()
            self._began.append(now)
            return self._raw, now

    def _is_slow(self) -> bool:
        """True if a call has run so long that the server may hang, and a new call with it."""
        oldest = min(self._began, default=None)
        return oldest is not None and time.monotonic() - oldest > _SLOW_CALL_S

    def _connect(self) -> None:
        if not self._setting_up.acquire(timeout=_SET_UP_S):
            raise StoreTimeout(f"{self._label}: another thread is still connecting")
        try:
            if self._suspended is not None:
                raise self._refusal()
            if self._raw is not None:
                return
            self._server.require()
            close_at_exit(self)
            raw = self._set_up()
            if isinstance(raw, int):
                raise StoreUnavailable(f"{self._label}: setup failed: {name_of(raw)}")
            self._is_suspect = False
            with self._changed:
                if not self._lifecycle.is_closed:
                    self._raw = raw
                    return
            close_in_time(raw, self._label)
            self._lifecycle.check()
        finally:
            self._setting_up.release()

    def _refusal(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._label}: an earlier call may still be under way; calls are refused until then"
        )
