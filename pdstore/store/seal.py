"""seal_store: wraps a store to encrypt its values; the keys are in PDSTORE_SEAL_KEY_FILE."""

# Decision: docs/decisions/010-seal.md
from __future__ import annotations

import logging
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pdstore.errors import ConfigError, Forged, MissingExtra, OtherSeal, Reason, StoreError
from pdstore.format.keys import PERMANENT, BlockKey, kind_of
from pdstore.settings import Settings
from pdstore.store.base import P, Slots, Store, check_call, count_of, num_done_of
from pdstore.store.optional import (
    EvictsByUse,
    FindsAgain,
    FindsKeys,
    MeetsInTier,
    OpensTiers,
    Promotes,
    ShowsTiers,
    TakesAdmission,
    TellsChanges,
    TellsReads,
    TellsRemovals,
    TellsRoom,
    TellsTiers,
)
from pdstore.store.transfer import MovesValues
from pdstore.store.wrappers import WrapperStore

if TYPE_CHECKING:  # pdstore without extras does not install `cryptography`
    from pdstore.format.envelope import Envelopes

log = logging.getLogger(__name__)

_ALIGN = 4096
_ERRORS = {
    Reason.OTHER_SEAL: (OtherSeal, "not encrypted with a key of PDSTORE_SEAL_KEY_FILE"),
    Reason.FORGED: (Forged, "damaged, moved here from another key, or forged"),
}


class Encrypted(WrapperStore):
    """Encrypts values that are put, decrypts values that are got, and changes nothing else.

    Somebody who can use the pool but has no seal key can read no value, and can make no value that
    `get` accepts: at such a value `get` raises OtherSeal or Forged. The pool's id is not encrypted,
    because it only tells pools apart, and instances with other seal keys must read it. Nor are
    purge numbers, which several tiers below this wrapper keep.

    Values pass through memory of the wrapped store (`Store.allocate`), a batch at a time. Each
    running call holds `batch_bytes` of such memory, or more if one value needs more. A store's own
    way to move values (`MovesValues`) is not used.
    """

    passes = (
        FindsAgain,
        FindsKeys,
        ShowsTiers,
        TakesAdmission,
        TellsChanges,
        TellsReads,
        TellsRemovals,
        TellsRoom,
        EvictsByUse,
        TellsTiers,
    )

    def __init__(self, store: Store, envelopes: Envelopes, batch_bytes: int = 16 << 20) -> None:
        super().__init__(store)
        self.added_bytes = envelopes.added_bytes
        self._envelopes = envelopes
        self._batch_bytes = batch_bytes
        self._spare: list[memoryview] = []
        self._lock = threading.Lock()

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._in_batches(keys, slots, self._get)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._in_batches(keys, slots, self._put)

    def allocate(self, num_bytes: int) -> memoryview:
        """Returns plain memory, because the wrapped store never moves it."""
        return Store.allocate(self, num_bytes)

    def optional(self, protocol: type[P]) -> P | None:
        sealed = _SEALED.get(protocol)
        if sealed is None:
            return super().optional(protocol)
        found = self.wrapped.optional(protocol)
        return cast(P, sealed(self, found)) if found is not None else None

    def over(self, store: Store) -> Encrypted:
        """Returns a store that encrypts the values of another one in the same way."""
        return Encrypted(store, self._envelopes, self._batch_bytes)

    def _in_batches(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        call: Callable[[Sequence[BlockKey], Slots, Slots], int],
    ) -> int:
        """Calls `call` for each batch until one falls short; returns the number of served keys."""
        check_call(keys, slots)
        if not keys:
            return call(keys, slots, slots)
        slot_bytes = -(-(max(slots.sizes) + self.added_bytes) // _ALIGN) * _ALIGN
        step = max(1, self._batch_bytes // slot_bytes)
        for start in range(0, len(keys), step):
            batch = keys[start : start + step]
            part = slots.part(start, start + step)
            with self._memory(len(batch) * slot_bytes) as view:
                sizes = [
                    size if kind_of(key) in PERMANENT else size + self.added_bytes
                    for key, size in zip(batch, part.sizes, strict=True)
                ]
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
            if kind_of(key) in PERMANENT:
                stored.value(i)[:] = slots.value(i)
            else:
                self._envelopes.encrypt(key, slots.value(i), stored.value(i))
        return count_of(self.wrapped.put(keys, stored), keys, self.wrapped)

    def _get(self, keys: Sequence[BlockKey], slots: Slots, stored: Slots) -> int:
        try:
            found = count_of(self.wrapped.get(keys, stored), keys, self.wrapped)
        except StoreError as error:
            self._decrypt(keys[: num_done_of(error, keys)], slots, stored)
            raise
        self._decrypt(keys[:found], slots, stored)
        return found

    def _decrypt(self, keys: Sequence[BlockKey], slots: Slots, stored: Slots) -> None:
        """Decrypts into `slots`. Raises OtherSeal or Forged at a value that must not be used."""
        for i, key in enumerate(keys):
            if kind_of(key) in PERMANENT:
                slots.value(i)[:] = stored.value(i)
                continue
            wrong = self._envelopes.decrypt(key, stored.value(i), slots.value(i))
            if wrong is not None:
                kind, words = _ERRORS[wrong]
                raise kind(f"{self.label}: {key}: {words}", num_done=i)

    @contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Lends memory of the kind that the wrapped store moves fastest."""
        with self._lock:
            view = self._spare.pop() if self._spare else None
        if view is None or len(view) < num_bytes:
            view = self.wrapped.allocate(max(num_bytes, self._batch_bytes))
        try:
            yield view
        finally:
            with self._lock:
                self._spare.append(view)


class _Meeting:
    """MeetsInTier: the tier where hand-offs meet, encrypted as the whole store is."""

    def __init__(self, whole: Encrypted, inner: MeetsInTier) -> None:
        self._store = whole.over(inner.meeting_store())

    def meeting_store(self) -> Store:
        return self._store


class _Tiers:
    """OpensTiers: the tiers, each encrypted as the whole store is."""

    def __init__(self, whole: Encrypted, inner: OpensTiers) -> None:
        self._whole = whole
        self._inner = inner

    def tier_stores(self) -> Sequence[Store]:
        return [self._whole.over(store) for store in self._inner.tier_stores()]


class _Promotes:
    """Promotes: encrypts once more what goes up, after it is chosen.

    Else a sealed pool would read what is used often from its slowest tier each time. The value
    above then has another nonce than the one below; either of them is right.
    """

    def __init__(self, whole: Encrypted, inner: Promotes) -> None:
        self._inner = inner
        meeting = whole.optional(MeetsInTier)
        assert meeting is not None  # a store that promotes has tiers
        self._put = meeting.meeting_store().put

    def promote(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        put: Callable[[Sequence[BlockKey], Slots], int] | None = None,
    ) -> None:
        self._inner.promote(keys, slots, put or self._put)


_SEALED: Mapping[type, Callable[[Encrypted, Any], object]] = {
    MeetsInTier: _Meeting,
    OpensTiers: _Tiers,
    Promotes: _Promotes,
}
"""The optional protocols whose calls move values of several tiers."""


def seal_store(store: Store, settings: Settings) -> Store:
    """Returns a store that encrypts; `store` itself if it encrypts already or no key file is set.

    Raises ConfigError for a key file that cannot be used, MissingExtra without `cryptography`.
    """
    if settings.seal_key_file is None:
        return store
    keys = read_seal_keys(settings.seal_key_file)
    try:
        from pdstore.format.envelope import Envelopes
    except ImportError as error:
        raise MissingExtra(
            f"PDSTORE_SEAL_KEY_FILE needs a package that is not installed ({error.name}):"
            " pip install 'pdstore[seal]'"
        ) from error
    inner = store
    while isinstance(inner, WrapperStore):
        if isinstance(inner, Encrypted):
            return store
        inner = inner.wrapped
    envelopes = Envelopes(keys)
    how = ", through staging" if store.optional(MovesValues) else ""
    log.info("%s: values are encrypted%s; seal key %s", store.label, how, envelopes.key_id.hex())
    return Encrypted(store, envelopes)


_NAME = "PDSTORE_SEAL_KEY_FILE"
_MAKE = "(umask 077; openssl rand -hex 32 > seal.key)"
_MAX_KEYS = 2
_MAX_BYTES = 4096
_KEY = re.compile("[0-9a-fA-F]{64}")


def read_seal_keys(path: Path) -> list[bytes]:
    """Returns the seal keys in a file; the first one encrypts.

    The file has one key, or two during a rotation: a line of 64 hex digits for each. Empty lines
    and lines that begin with # are ignored. Only the file's owner may be able to read it.
    Raises ConfigError, whose text never quotes the file.
    """
    lines = [line.strip() for line in _text_of(path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise ConfigError(
            f"{_NAME}: {path} has {len(keys)} keys: write one, or two during a rotation;"
            f" make one with {_MAKE}"
        )
    if not all(map(_KEY.fullmatch, keys)):
        raise ConfigError(f"{_NAME}: a key in {path} is not 64 hex digits; make one with {_MAKE}")
    found = [bytes.fromhex(key) for key in keys]
    if len(set(found)) < len(found):
        raise ConfigError(f"{_NAME}: both keys in {path} are the same one")
    return found


def _text_of(path: Path) -> str:
    try:
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ConfigError(f"{_NAME}: {path} is not a file of at most {_MAX_BYTES} bytes")
        if mode & 0o077:
            raise ConfigError(f"{_NAME}: other users may read {path} (mode {mode:o}): chmod 600 it")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{_NAME}: cannot read {path} ({error.strerror}); make a key with {_MAKE}"
        ) from error
    if not data.isascii():
        raise ConfigError(f"{_NAME}: {path} is no key file; make one with {_MAKE}")
    return data.decode("ascii")
