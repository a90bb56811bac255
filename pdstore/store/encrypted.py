"""Encrypted: any store, with its values encrypted before they leave this process."""

# Decision: docs/decisions/010-seal.md
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pdstore.errors import Forged, OtherSeal, StoreError
from pdstore.format.envelope import ENVELOPE_BYTES, Envelopes
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.outcome import Reason
from pdstore.store.base import Slots, Store, check_call, count_of, num_done_of
from pdstore.store.optional import (
    ErrorCodes,
    FindsKeys,
    LimitsValues,
    TellsChanges,
    TellsRoom,
)
from pdstore.store.wrappers import WrapperStore

_BATCH_BYTES = 16 << 20
_ALIGN = 4096
_KINDS = {Reason.OTHER_SEAL: OtherSeal, Reason.FORGED: Forged}


class Encrypted(WrapperStore):
    """Encrypts what is put and decrypts what is got; keys, leases and everything else stay.

    Whoever has the pool but no seal key can read no value, and can make none that `get` returns:
    it raises OtherSeal or Forged at such a value. The pool's id is not encrypted: it only tells
    pools apart, and must be read by instances with any seal key.

    Values pass through memory of the other store (`Store.allocate`), a batch at a time; each call
    under way holds `batch_bytes` of it, or one value. Values in an arena's own memory are
    copied so, too.
    """

    passes = (FindsKeys, TellsChanges, ErrorCodes, LimitsValues, TellsRoom)
    added_bytes = ENVELOPE_BYTES

    def __init__(self, store: Store, envelopes: Envelopes, batch_bytes: int = _BATCH_BYTES) -> None:
        super().__init__(store)
        self._envelopes, self._batch_bytes = envelopes, batch_bytes
        self._spare: list[memoryview] = []
        self._lock = threading.Lock()

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._in_batches(keys, slots, self._get)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._in_batches(keys, slots, self._put)

    def allocate(self, num_bytes: int) -> memoryview:
        """Returns plain memory: the other store never sees it."""
        return Store.allocate(self, num_bytes)

    def _in_batches(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        call: Callable[[Sequence[BlockKey], Slots, Slots], int],
    ) -> int:
        """Makes a call for each batch, until one falls short; returns how many it served."""
        check_call(keys, slots)
        if not keys:
            return call(keys, slots, slots)
        slot_bytes = -(-(max(slots.sizes) + ENVELOPE_BYTES) // _ALIGN) * _ALIGN
        step = max(1, self._batch_bytes // slot_bytes)
        for start in range(0, len(keys), step):
            batch, part = keys[start : start + step], slots.part(start, start + step)
            with self._memory(len(batch) * slot_bytes) as view:
                sizes = [_stored_size(*pair) for pair in zip(batch, part.sizes, strict=True)]
                stored = Slots(view, slot_bytes, range(len(batch)), sizes)
                try:
                    done = call(batch, part, stored)
                except StoreError as error:
                    error.num_done = start + num_done_of(error, batch)
                    raise
            if done < len(batch):
                return start + done
        return len(keys)

    def _put(self, keys: Sequence[BlockKey], slots: Slots, stored: Slots) -> int:
        for i, key in enumerate(keys):
            if kind_of(key) is Kind.POOL:
                stored.value(i)[:] = slots.value(i)
            else:
                self._envelopes.encrypt(key, slots.value(i), stored.value(i))
        return count_of(self._store.put(keys, stored), keys, self._store)

    def _get(self, keys: Sequence[BlockKey], slots: Slots, stored: Slots) -> int:
        try:
            found = count_of(self._store.get(keys, stored), keys, self._store)
        except StoreError as error:
            self._decrypt(keys[: num_done_of(error, keys)], slots, stored)
            raise
        self._decrypt(keys[:found], slots, stored)
        return found

    def _decrypt(self, keys: Sequence[BlockKey], slots: Slots, stored: Slots) -> None:
        """Fills the slots. Raises OtherSeal or Forged at the first value that must not be used."""
        for i, key in enumerate(keys):
            if kind_of(key) is Kind.POOL:
                slots.value(i)[:] = stored.value(i)
                continue
            wrong = self._envelopes.decrypt(key, stored.value(i), slots.value(i))
            if wrong is not None:
                raise _KINDS[wrong](f"{self.label}: {key}: {_WORDS[wrong]}", num_done=i)

    @contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Lends memory that the other store moves fastest."""
        with self._lock:
            view = self._spare.pop() if self._spare else None
        if view is None or len(view) < num_bytes:
            view = self._store.allocate(max(num_bytes, self._batch_bytes))
        try:
            yield view
        finally:
            with self._lock:
                self._spare.append(view)


_WORDS = {
    Reason.OTHER_SEAL: "not encrypted with a key of PDSTORE_SEAL_KEY_FILE",
    Reason.FORGED: "damaged, moved here from another key, or forged",
}


def _stored_size(key: BlockKey, size: int) -> int:
    return size if kind_of(key) is Kind.POOL else size + ENVELOPE_BYTES
