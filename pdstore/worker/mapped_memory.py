"""MappedMemory: a store's own memory, registered with the device that copies to and from it."""

from __future__ import annotations

from pdstore.native.library import address_of
from pdstore.store.in_place import InPlace
from pdstore.worker.pinned_memory import PinnedMemory, spans_of
from pdstore.worker.swap.base import Registrar


class MappedMemory:
    """Registers the memory of an in-place store, beside whatever else the engine's start does.

    registrar: registers the memory; None: copies need no registered memory.
    Raises StoreError if the store cannot be reached now.
    """

    def __init__(self, in_place: InPlace, registrar: Registrar | None) -> None:
        view = in_place.memory()
        self.num_bytes = len(view)
        self._pinned: PinnedMemory | None = None
        if registrar is not None:
            span = in_place.span_bytes
            spans = spans_of(address_of(view), len(view), span, span)
            self._pinned = PinnedMemory(registrar, spans)

    def ready(self, timeout_s: float) -> None:
        """Waits until the memory is registered. Raises why it cannot be, or TimeoutError."""
        if self._pinned is not None:
            self._pinned.ready(timeout_s)

    def is_ready(self, wait_s: float) -> bool:
        """Waits up to `wait_s`; True if the memory is registered. Raises if it cannot be."""
        return self._pinned is None or self._pinned.is_ready(wait_s)

    def close(self) -> None:
        """Unregisters the memory; no copy may be on its way. Twice is fine."""
        if self._pinned is not None:
            self._pinned.close()
