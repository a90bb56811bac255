"""The result codes of Mooncake's calls: their names, and the errors that they become."""

from __future__ import annotations

from pdstore.errors import StoreDenied, StoreError, StoreFull, StoreTimeout, StoreUnavailable

INTERNAL = -1
NO_ROOM = -200
INVALID = -600
HALF_WRITTEN = -703
ABSENT = -704
LEASE_OVER = -707
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMED_OUT = -901

_NAMES = {
    INTERNAL: "internal error",
    NO_ROOM: "no room",
    INVALID: "invalid arguments",
    -601: "another client replaced it",
    -700: "no readable replica",
    -701: "no readable replica",
    -702: "no readable replica",
    HALF_WRITTEN: "half-written",
    ABSENT: "not stored",
    LEASE_OVER: "the lease ended during the read",
    TRANSFER_FAILED: "the process that holds the memory does not answer",
    RPC_FAILED: "the master does not answer",
    RPC_TIMED_OUT: "the master did not answer in time",
    -1700: "the tenant's quota is used up",
    -1701: "the tenant is not registered at the master",
    -1702: "the tenant is not empty",
}

MISSES = frozenset({-700, -701, -702, HALF_WRITTEN, ABSENT, LEASE_OVER, TRANSFER_FAILED})
"""Codes of a read whose value cannot be had now: a miss, not an error."""

_ERRORS: dict[int, type[StoreError]] = {
    INTERNAL: StoreUnavailable,  # also when the process that shares our memory is gone
    NO_ROOM: StoreFull,
    TRANSFER_FAILED: StoreUnavailable,
    RPC_FAILED: StoreUnavailable,
    RPC_TIMED_OUT: StoreTimeout,
    -1700: StoreFull,
    -1701: StoreDenied,
    -1702: StoreDenied,
}


def name_of(code: int) -> str:
    """Returns the meaning of a code, followed by the code."""
    return f"{_NAMES.get(code, 'error')} ({code})"


def is_outage(code: int) -> bool:
    """True if the master, or the process that shares our memory, does not answer."""
    return code in (INTERNAL, RPC_FAILED, RPC_TIMED_OUT) or -1012 <= code <= -1000


def error_of(code: int, what: str, *, num_done: int = 0) -> StoreError:
    """Returns the exception for a code; `what` names the store, the verb and the key."""
    kind = _ERRORS.get(code, StoreUnavailable if is_outage(code) else StoreError)
    return kind(f"{what}: {name_of(code)}", num_done=num_done)
