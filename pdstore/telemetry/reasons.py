"""The meaning of each reason of a miss or a drop, what to look at, and its warning in the log.

`Repeats` is our own. The library log-rate-limit would replace 24 of the 61 lines that limit a log
here and in `MismatchLog`. But it counts by the clock of the day: when that clock was set back by
an hour, no repeated line was logged for 57 minutes.
"""

# Decision: docs/decisions/037-one-door-for-misses.md
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from pdstore.errors import Cause, Reason, Severity, StoreError

log = logging.getLogger(__name__)


class Advice(NamedTuple):
    """The meaning of a reason, and what a person should look at or do about it."""

    means: str
    look_at: str


ADVICE: dict[Reason, Advice] = {
    Reason.ABSENT: Advice(
        "the next block is not in the pool: never stored, or evicted",
        "nothing, for a new prompt; else the pool's size",
    ),
    Reason.LOST: Advice(
        "a matched block was gone when it was read",
        "the line of the request, which says how long after its lookup; the pool's size and its"
        " eviction policy; leases (`doctor` shows them)",
    ),
    Reason.CORRUPT: Advice(
        "checksum, header or length of a value is wrong; the value was removed",
        "the store's host and memory",
    ),
    Reason.FOREIGN: Advice(
        "an intact value belongs to another key; it was removed", "who else writes to the pool"
    ),
    Reason.OTHER_SEAL: Advice(
        "a value is encrypted with a seal key that this instance lacks; an instance that saves"
        " prompts removes the value, and a `decode` instance leaves it",
        "`PDSTORE_SEAL_KEY_FILE` of P and D",
    ),
    Reason.FORGED: Advice(
        "an encrypted value is not what was stored under its key: damaged, moved or forged; it was"
        " removed",
        "who else writes to the pool",
    ),
    Reason.NAMESPACE: Advice(
        "weights, layout, format or salt of P and D differ", "the log, which names each field"
    ),
    Reason.OTHER_POOL: Advice(
        "P writes to another store than D reads", "`PDSTORE_STORE` of P and D"
    ),
    Reason.HANDOFF_FAILED: Advice(
        "P said that it could not publish the whole prompt", "P's log, and its drops by reason"
    ),
    Reason.HANDOFF_LATE: Advice(
        "P's marker did not come before `PDSTORE_HANDOFF_WAIT_S`",
        "whether P lives and how long its saves take; whether `PDSTORE_HANDOFF_TTL_S` is too short",
    ),
    Reason.HANDOFF_DEAD: Advice(
        "P's heartbeat stopped before its marker came: P died, or could not write to the store",
        "whether P lives; its log, and its drops by reason",
    ),
    Reason.HANDOFF_GONE: Advice(
        "the pool has nothing of the hand-off, not even a sign of P: it was purged or evicted, its"
        " marker expired, or P ended before it stored anything",
        "whether somebody ran `pdstore purge`; the pool's size; `PDSTORE_HANDOFF_TTL_S`; P's log",
    ),
    Reason.DEADLINE: Advice(
        "a job or a lookup had not ended at its deadline",
        "`pdstore_store_seconds`; the load of the store and its network",
    ),
    Reason.STORE_DOWN: Advice(
        "the store does not answer or takes no writes, or the breaker is open",
        "whether the store runs at `PDSTORE_STORE`; `python -m pdstore doctor`",
    ),
    Reason.STORE_SLOW: Advice(
        "a store call timed out, or calls hang",
        "the load of the store and its network; `python -m pdstore doctor`",
    ),
    Reason.STORE_FULL: Advice(
        "there was no room for a value, and nothing could be evicted",
        "the pool's size (`?budget=`, `?size=`, redis' `maxmemory`), the disk, and leases",
    ),
    Reason.NOT_ADMITTED: Advice(
        "the pool is full, and a save would evict values that will be used sooner than its own",
        "nothing; a larger pool would find more",
    ),
    Reason.STORE_DENIED: Advice(
        "the store refuses this user",
        "owner and mode of the directory; user and password in `PDSTORE_STORE`",
    ),
    Reason.STORE_ERROR: Advice("any other error of the store", "the log of the store"),
    Reason.QUEUE_FULL: Advice(
        "too many jobs or bytes wait, so the job was dropped",
        "whether the store keeps up with what P saves and D loads",
    ),
    Reason.NO_SLOTS: Advice("no staging slot became free in time", "`PDSTORE_STAGING`"),
    Reason.CANCELLED: Advice("the request was aborted", "nothing"),
    Reason.CLOSED: Advice(
        "the pool was closed, or a parent process opened it", "nothing, if P or D stopped"
    ),
    Reason.READ_ONLY: Advice("`PDSTORE_PUBLISH=0`", "nothing: the setting asks for it"),
    Reason.FAULT: Advice(
        "a defect or a device error in pdstore itself", "the log; please report it"
    ),
}
"""The advice for every reason; docs/metrics.md shows it as a table."""


def is_quiet(reason: Reason) -> bool:
    """Returns whether a reason has no warning here: it is no fault, or other code warns of it."""
    is_no_fault = reason.severity in (Severity.ORDINARY, Severity.NOTICE)
    return is_no_fault or reason.cause is Cause.MISMATCH  # PrefixCacheManager warns of these


class Repeats:
    """Limits lines of a log that repeat: the first is written, then at most one in `interval_s`.

    A later line says how many were left out. Any thread may call it.
    """

    def __init__(
        self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[Hashable, float] = {}
        self._left_out: dict[Hashable, int] = {}

    def note(self, about: Hashable) -> str | None:
        """Returns what to write behind a line; None if the line is to be left out.

        about: what a line shares with those that it repeats; there should be few different ones.
        """
        with self._lock:
            now = self._clock()
            if now < self._next.get(about, now):
                self._left_out[about] = self._left_out.get(about, 0) + 1
                return None
            self._next[about] = now + self._interval_s
            number = self._left_out.pop(about, 0)
        return f" ({number} more like it since the last such line)" if number else ""


class ReasonLog:
    """Warns when a reason occurs for the first time, and then at most once in `interval_s` seconds.

    A later warning says how many warnings were left out. Any thread may call it.
    """

    def __init__(
        self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._repeats = Repeats(interval_s, clock)

    def warn(self, what: str, reason: Reason, error: BaseException | None = None) -> None:
        """Warns that `what` fell short, with the reason and what to look at.

        what: "a lookup", "a load" or "a save".
        error: the exception behind the reason, if there was one.
        """
        if is_quiet(reason):
            return
        left_out = self._repeats.note((what, reason))
        if left_out is not None:
            log.warning("%s", _text(what, reason, error) + left_out)


def _text(what: str, reason: Reason, error: BaseException | None) -> str:
    advice = ADVICE[reason]
    words = f"{what} fell short ({reason.value}): "
    if isinstance(error, StoreError) and error.remedy:  # the error says what to do
        words += str(error)
    else:
        words += f"{advice.means} [{error}]" if error is not None and str(error) else advice.means
        words += f". Look at {advice.look_at}"
    return words.replace("`", "")
