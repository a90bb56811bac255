"""Beats: puts the beats of one instance into the store, round their ring."""

from __future__ import annotations

import contextlib

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.handoff import RING, beat_key
from pdstore.format.keys import BlockKey
from pdstore.format.namespace import Namespace
from pdstore.store.base import Slots, Store

_SLOT_BYTES = 4096


class Beats:
    """The beats that an instance has put, and the next one. For one thread.

    instance: its id, 32 hex digits.
    """

    def __init__(self, store: Store, namespace: Namespace, instance: str) -> None:
        self._store, self._namespace, self._instance = store, namespace, instance
        self._number = 0  # of the next beat

    def put_next(self) -> None:
        """Puts a beat, and removes all before it but the last one.

        A beat that the store does not take is left out: the save in progress reports the error.
        """
        number, self._number = self._number, (self._number + 1) % RING
        slots = Slots(self._store.allocate(_SLOT_BYTES), _SLOT_BYTES, [0], [block.HEADER_BYTES])
        id = bytes.fromhex(self._instance)
        header = block.Header(block.FLAG_MARKER, 0, 0, 1, 0, 0, self._namespace.digest, id)
        block.seal(slots.value(0), header)
        with contextlib.suppress(StoreError):
            self._store.put([self._key(number)], slots)
            self._store.remove([self._key(number - 2), self._key(number - 3)])

    def _key(self, number: int) -> BlockKey:
        return beat_key(self._namespace, self._instance, number)
