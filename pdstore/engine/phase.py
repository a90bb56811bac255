"""RequestPhase: where a request stands in the pool. LEGAL: which call is legal in which phase."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from pdstore.errors import IllegalCall


class RequestPhase(enum.Enum):
    """Where an `EngineRequest` stands.

    A request goes through the phases in this order, and may leave out some. An engine that preempts
    a request may look again for what it can load, and load it: that request then goes through
    LOADING and LOADED, and from there back to the phase that it had.
    """

    LOOKUP = "the pool has not yet answered what it has of the prompt"
    FOUND = "the pool has answered, or nothing was asked; nothing is computed yet"
    LOADING = "a job of the planned load runs on some rank"
    LOADED = "all jobs of the load have ended, and `end_load` has not seen it"
    PREFILLING = "the model was given a part of the prompt"
    PREFILLED = "the model was given all of the prompt; the answer has no token yet"
    ANSWERING = "the answer has its first token"
    ENDED = "the request has ended; jobs of it may still run"


PROMPT_GIVEN = frozenset({RequestPhase.PREFILLED, RequestPhase.ANSWERING})
"""The model was given all of the prompt, maybe before it was preempted."""

_ALL = frozenset(RequestPhase)
_OPEN = _ALL - {RequestPhase.ENDED}
_LOADS = {RequestPhase.LOADING, RequestPhase.LOADED}
_LOOKED_UP = _OPEN - {RequestPhase.LOOKUP}
_SETTLED = _LOOKED_UP - _LOADS  # what the request has of the prompt is known
_PREFILL_BEGUN = _SETTLED - {RequestPhase.FOUND}

LEGAL: Mapping[str, frozenset[RequestPhase]] = {
    "poll": _OPEN - _LOADS,
    "find": _SETTLED,  # again if no blocks were free, or if the request was preempted
    "plan_load": _SETTLED,
    "end_load": _LOOKED_UP - {RequestPhase.LOADING},  # without a load, it says what is there
    "begin_step": _SETTLED,
    "plan_save": _PREFILL_BEGUN,
    # an engine may preempt a request, and see its first token or its end while it loads again
    "end_prompt": _LOOKED_UP,
    "plan_answer_save": _LOOKED_UP - {RequestPhase.FOUND, RequestPhase.PREFILLING},
    "leave_pool": _OPEN,
    "give_up": _ALL,  # it is called where a fault is handled, so it must not raise
    "end": _OPEN,
}
"""By the names of the methods of `EngineRequest`."""


def check_call(call: str, phase: RequestPhase, request_id: str) -> None:
    """Raises IllegalCall unless the call is legal in the phase."""
    if phase in LEGAL[call]:
        return
    legal = ", ".join(sorted(name for name, phases in LEGAL.items() if phase in phases))
    raise IllegalCall(
        f"{call} of request {request_id!r} is not legal in phase {phase.name}: {phase.value};"
        f" legal now: {legal}",
        request_id,
    )
