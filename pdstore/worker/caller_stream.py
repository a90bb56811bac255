"""behind_caller: an event behind what the calling thread has queued on the device."""

from __future__ import annotations

import torch

from pdstore.errors import SwapError
from pdstore.worker.swap.base import ReadyEvent, Swap


def behind_caller(swap: Swap) -> ReadyEvent | None:
    """Returns an event behind what the caller's stream has queued; None where there is no stream.

    Raises SwapError while that stream is being captured into a graph.
    """
    device = swap.device
    if device.type != "cuda":
        return None
    with swap.relaxed(), torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise SwapError("KVPool cannot be called while its stream is being captured")
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event
