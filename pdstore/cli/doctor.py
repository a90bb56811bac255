"""Tries a store the way P and D use it, with one small value of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch

from pdstore.cli.report import Report, seconds_of
from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.namespace import HASH_BYTES
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots, Store
from pdstore.store.connect import read_pool_id
from pdstore.store.find import find_optional
from pdstore.store.in_place import InPlace
from pdstore.store.optional import ErrorCodes
from pdstore.store.seal import seal_store

_SIZE = 4096
_ARENA = (
    "if P and D both run on this host: PDSTORE_STORE=shm://pool?size=64GiB hands KV over faster,"
    " through memory that their GPUs copy to and from"
)


def doctor(url: str | None, count_gpus: Callable[[], int] = torch.cuda.device_count) -> Report:
    """Puts, matches, gets, verifies and removes a value, and times each.

    url: None takes PDSTORE_STORE.
    count_gpus: says how many GPUs this host has; with GPUs, an arena is recommended.
    Raises ConfigError for a bad URL, StoreError at the first step that fails or answers wrongly.
    """
    settings = read_settings(**({"store": url} if url else {}))
    store = seal_store(open_store(settings.store, settings), settings)
    try:
        report = _try(store)
        is_sealed = settings.seal_key_file is not None  # then an arena would not be in place
        if count_gpus() and not is_sealed and find_optional(store, InPlace) is None:
            report.notes.append(_ARENA)
        return report
    finally:
        store.close()


def _try(store: Store) -> Report:
    name = secrets.token_bytes(HASH_BYTES)
    keys = [BlockKey(f"pds1:doctor:{name.hex()}")]
    slots = Slots(store.allocate(_SIZE), _SIZE, [0], [_SIZE])
    header = block.Header(0, 0, 0, 1, 1, _SIZE - block.HEADER_BYTES, bytes(HASH_BYTES), name)
    block.seal(slots.value(0), header)
    report = Report(store.label, ["step", "ms"])

    def step(what: str, function: Callable[[], bool]) -> None:
        def checked() -> None:
            if not function():
                raise StoreError(f"{store.label}: {what} gave a wrong result")

        report.add(what, seconds_of(checked) * 1e3)

    def verified() -> bool:
        slots.view[:] = bytes(_SIZE)
        return store.get(keys, slots) == 1 and block.verify(slots.value(0), header) is None

    def removed() -> bool:
        store.remove(keys)
        return store.match(keys) == 0

    step("connect, match of what is not there", lambda: store.match(keys) == 0)
    step("put 4 KiB", lambda: store.put(keys, slots) == 1)
    step("match", lambda: store.match(keys) == 1)
    step("get and verify", verified)
    step("remove", removed)
    report.notes.append(f"pool {read_pool_id(store).hex()[:8]}, lease {store.lease_s:g} s")
    library = find_optional(store, ErrorCodes)
    codes = library.codes() if library else {}
    report.notes += [f"{count} x {code}" for code, count in sorted(codes.items())]
    return report
