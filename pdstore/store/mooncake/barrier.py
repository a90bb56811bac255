"""Barrier: holds a failed call back until nothing reads or writes its memory any more.

The library gives up some calls while their transfers go on; late bytes would land in another block.

Shared memory: the library's own calls to `mooncake_client` end after 30 s, which no variable
changes. A `mooncake_client` that was stopped during a request resumes it later. It holds a lock
from the start to the end of such a request, and takes that lock exclusively to forget memory. So
once it has answered that it forgot all memory of a connection, that connection's requests are over,
or will be refused.

TCP and RDMA: the library waits 60 s for a transfer, a constant, and then reports a failure without
cancelling the transfer. A failure before that is reported only when the socket or the NIC is done
with the memory. Closing the connection ends the other transfers.
"""

# Decision: docs/decisions/029-mooncake-late-bytes.md
from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from pdstore.store.mooncake.client import Client, Server, State
from pdstore.store.mooncake.library import Raw, is_outage
from pdstore.store.mooncake.memory import Memory

log = logging.getLogger(__name__)

GIVEN_UP_S = 55.0  # a little before the library's 60 s: its clock is another one
KEPT = "memory kept until nobody uses it"
"""The name under which `codes()` counts the calls that waited here."""


class Answer(NamedTuple):
    """The result of a call that moved values: the library's object, its codes, the seconds."""

    raw: Raw
    codes: list[int]
    seconds: float


class Barrier:
    """Waits until the transfers that failed calls of one client left under way are over.

    label: of the store, for messages.
    sharer: the process that shares our memory; None when this process moves the bytes itself.
    pause_s: between two attempts.
    given_up_s: a call that fails after this long may be one that the library gave up.
    """

    def __init__(
        self,
        label: str,
        client: Client,
        memory: Memory,
        sharer: Server | None,
        *,
        pause_s: float = 0.2,
        given_up_s: float = GIVEN_UP_S,
    ) -> None:
        self._label = label
        self._client = client
        self._memory = memory
        self._sharer = sharer
        self._pause_s = pause_s
        self._given_up_s = given_up_s
        self._trying = threading.Lock()
        self._num_answers = 0  # in a row: a process that is being killed may still give one

    def is_needed(self, answer: Answer) -> bool:
        """True if the call's transfers may still go on."""
        if self._sharer is not None:
            return any(is_outage(code) for code in answer.codes)
        return answer.seconds > self._given_up_s and any(code < 0 for code in answer.codes)

    def wait_after(self, answer: Answer) -> None:
        """Returns when nothing can use the call's memory any more: at once after most calls.

        Otherwise blocks for as long as that takes, even if the store is closed meanwhile, and
        other calls are refused. The job's deadline ends the job, but its slots stay lent until
        this returns.
        """
        if not self.is_needed(answer):
            return
        log.warning(
            "%s: a call was given up after %.0f s and may still be under way;"
            " its memory is kept until that is over",
            self._label,
            answer.seconds,
        )
        self._client.codes[KEPT] += 1
        self._client.suspend(answer.raw)
        start = time.monotonic()
        while self._client.is_suspended(answer.raw):
            with self._trying:
                if self._client.is_suspended(answer.raw):
                    self._try(answer.raw)
            if self._client.is_suspended(answer.raw):
                time.sleep(self._pause_s)
        waited = time.monotonic() - start
        log.warning("%s: that call is over; its memory was kept for %.1f s", self._label, waited)

    def _try(self, raw: Raw) -> None:
        """Ends the suspension if nothing can be under way any more."""
        if self._sharer is None:
            if not self._client.num_running:
                self._memory.detach(raw)
                self._client.replace(raw)
            return
        state = self._sharer.ask()
        self._num_answers = self._num_answers + 1 if state is State.ANSWERS else 0
        if state is State.GONE:
            self._client.restore(raw)  # the library finds the successor by itself
        elif self._num_answers > 1 and not self._client.num_running and self._is_forgotten(raw):
            self._num_answers = 0
            self._client.replace(raw)  # late requests of the old connection find no memory mapped

    def _is_forgotten(self, raw: Raw) -> bool:
        """True if the other process has certainly forgotten all our memory.

        The library maps all memory again while its own ping fails. So the connection must be
        healthy before and after the call.
        """
        return raw.health_check() == 0 and self._memory.detach(raw) and raw.health_check() == 0
