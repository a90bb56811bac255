"""open_mover: moves values in a store's own memory where this process maps it, else by staging."""

from __future__ import annotations

import contextlib
import logging

from pdstore.errors import StoreError
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.in_place import InPlace, NativeInPlace
from pdstore.store.optional import SealingWriter, VerifyingReader
from pdstore.store.seal import seal_store
from pdstore.worker.block_range import Split
from pdstore.worker.in_place_mover import InPlaceMover
from pdstore.worker.mapped_memory import MappedMemory
from pdstore.worker.mover import BAD, Ends, Mover
from pdstore.worker.native_mover import NativeMover
from pdstore.worker.native_staged_mover import NativeStagedMover
from pdstore.worker.staged_mover import StagedMover
from pdstore.worker.staging import Staging
from pdstore.worker.swap.base import Swap
from pdstore.worker.swap.native import NativeSwap
from pdstore.worker.value_limit import check_values_fit

log = logging.getLogger(__name__)


def open_mover(
    settings: Settings,
    layout: Layout,
    swap: Swap,
    store: Store,
    metrics: Metrics,
    range_bytes: int,
    undo: contextlib.ExitStack,
) -> Mover:
    """Opens the mover that suits a store; `Mover.ready` waits until its memory is registered.

    store: the values that are moved to it are encrypted where PDSTORE_SEAL_KEY_FILE says so.
    undo: gets what closes that memory again.
    Raises ConfigError for a bad seal key file, and for blocks that the store can never take; it or
    LayoutError for staging that does not fit.
    """
    store = seal_store(store, settings)
    check_values_fit(store, layout)
    ends = Ends(layout, swap, store, metrics)
    saves = settings.publish and settings.role != "decode"
    # an instance that never saves cannot heal the value, and may have the wrong key itself
    removed = BAD | {Reason.OTHER_SEAL} if saves else BAD
    mover = _in_place(ends, range_bytes, undo)
    if mover is not None:
        return mover
    staging = Staging(
        store.allocate, layout.largest_payload_bytes, int(settings.staging), swap.registrar
    )
    undo.callback(staging.close)
    metrics.slots.set(staging.num_slots)
    metrics.slots_lent.set_function(lambda: staging.num_lent)
    undo.callback(metrics.slots_lent.set_function, lambda: 0)
    split = Split(range_bytes)
    reader, writer = find_optional(store, VerifyingReader), find_optional(store, SealingWriter)
    if reader is not None and writer is not None and isinstance(swap, NativeSwap):
        return NativeStagedMover(ends, swap, reader, writer, staging, split, removed)
    return StagedMover(ends, staging, split, removed)


def _in_place(ends: Ends, range_bytes: int, undo: contextlib.ExitStack) -> Mover | None:
    swap, store = ends.swap, ends.store
    in_place = find_optional(store, InPlace)
    if in_place is None:
        return None
    try:
        memory = MappedMemory(in_place, swap.registrar)
    except StoreError as error:
        log.warning("its memory is not there now, so values go through staging: %s", error)
        return None
    undo.callback(memory.close)
    log.info("%s: values are copied in its own memory, without staging", store.label)
    native = find_optional(store, NativeInPlace)
    if native is not None and isinstance(swap, NativeSwap):
        return NativeMover(ends, swap, native, memory, range_bytes)
    return InPlaceMover(ends, in_place, memory, Split(range_bytes))
