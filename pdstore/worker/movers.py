"""Mover: carries values between the paged cache and the store, one share of a job at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

from pdstore.errors import ConfigError, Reason, StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.arena.store import ArenaStore
from pdstore.store.base import Store, count_of, stored_among
from pdstore.store.optional import EvictsByUse, FindsKeys, find_optional
from pdstore.store.seal import seal_store
from pdstore.worker.admission import Admission
from pdstore.worker.job import ChildJob
from pdstore.worker.reading import BAD, Ends, read_values
from pdstore.worker.staging import PinnedMemory, Staging
from pdstore.worker.store_ends import InPlaceEnd, StagedEnd, StoreEnd
from pdstore.worker.swap.base import Swap
from pdstore.worker.swap.native import NativeSwap
from pdstore.worker.values import Split, Values

log = logging.getLogger(__name__)


class Mover:
    """Moves the values of a child job, on the thread of its worker.

    It moves whole blocks, from the first to the last. Only verified values count as loaded.

    way: the `StoreEnd` that moves values to the store and back.
    by_use: the store, if it has the calls of `EvictsByUse`; else None.
    admission: decides whether a save may evict; None if another instance waits for every save.
    """

    def __init__(self, ends: Ends, way: StoreEnd, admission: Admission | None = None) -> None:
        self.way = way
        self.ends = ends
        self.by_use = find_optional(ends.store, EvictsByUse)
        self._finder = find_optional(ends.store, FindsKeys)
        self._arena = find_optional(ends.store, ArenaStore)
        self.admission = admission if self.by_use is not None else None

    def num_matched(
        self, child: ChildJob, keys: Sequence[BlockKey], spared: tuple[int, float] | None = None
    ) -> int:
        """Returns how many leading keys are stored; leases them, but see `ArenaStore.renew`."""
        store, arena = self.ends.store, self._arena
        with child.in_store_call():
            found = arena.renew(keys, *spared) if arena and spared else store.match(keys)
            return count_of(found, keys, store)

    def num_stored(self, child: ChildJob, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading keys are stored; leases none if the store is FindsKeys."""
        if self._finder is None:
            return self.num_matched(child, keys)
        with child.in_store_call():
            stored = stored_among(self._finder.which_stored(keys), keys, self.ends.store)
        return next((i for i, key in enumerate(keys) if key not in stored), len(keys))

    def remove_wrong(self, child: ChildJob, values: Values) -> None:
        """Reads values and removes the wrong ones; loads nothing. Raises StoreError."""
        rest = values
        while rest:
            with self.way.slots(child, rest.sizes) as slots:
                asked = rest[: len(slots)]
                if not asked:
                    child.raise_if_over()
                    return
                read = read_values(self.ends, child, asked, slots)
            if read.shortfall is not None and read.shortfall.error is not None:
                raise read.shortfall.error
            rest = rest[min(read.num_read + 1, len(asked)) :]  # after the value that ended the read

    def mark(self, child: ChildJob, markers: Mapping[BlockKey, block.Header]) -> Reason | None:
        """Stores markers, each only a header. Returns None if other processes can read them all."""
        keys = list(markers)
        sizes = [block.HEADER_BYTES] * len(keys)
        with self.way.slots(child, sizes, len(keys)) as slots:
            if not len(slots):
                child.raise_if_over()
                return Reason.NO_SLOTS
            for i, header in enumerate(markers.values()):
                block.seal(slots.value(i), header)
            with child.in_store_call():
                self.ends.store.put(keys, slots)
        return None if self.num_matched(child, keys) == len(keys) else Reason.LOST


def open_mover(
    settings: Settings,
    layout: Layout,
    swap: Swap,
    store: Store,
    metrics: Metrics,
    range_bytes: int,
    undo: contextlib.ExitStack,
) -> Mover:
    """Opens the mover for a store; `KVPool.ready` waits until the mover's memory is registered.

    store: values on the way to this store are encrypted if PDSTORE_SEAL_KEY_FILE is set.
    undo: the function adds callbacks to it that unregister the memory.
    Raises ConfigError for a bad seal key file, and for blocks that the store can never take;
    ConfigError or LayoutError for staging that is too small.
    """
    store = seal_store(store, settings)
    check_values_fit(store, layout)
    heals = settings.publish and settings.role != "decode"
    # D does not remove values of another seal key: it does not save prompts again, and its own key
    # may be the wrong one
    removed = BAD | {Reason.OTHER_SEAL} if heals else BAD
    ends = Ends(layout, swap, store, metrics, removed)
    admission = Admission() if settings.role != "prefill" else None  # D waits for all of P's
    in_place = _in_place(ends, range_bytes, undo)
    if in_place is not None:
        return Mover(ends, in_place, admission)
    staging = Staging(
        store.allocate, layout.largest_payload_bytes, int(settings.staging), swap.registrar
    )
    undo.callback(staging.memory.close)
    metrics.slots.set(staging.num_slots)
    metrics.slots_lent.set_function(lambda: staging.num_lent)
    undo.callback(metrics.slots_lent.set_function, lambda: 0)
    return Mover(ends, StagedEnd(ends, staging, range_bytes), admission)


def _in_place(ends: Ends, range_bytes: int, undo: contextlib.ExitStack) -> InPlaceEnd | None:
    """Opens the way to an arena's own memory; None for another store or without native copies."""
    swap, store = ends.swap, ends.store
    arena = find_optional(store, ArenaStore)
    if arena is None or not isinstance(swap, NativeSwap):
        return None
    try:
        view, span = arena.memory(), arena.span_bytes
    except StoreError as error:
        log.warning("its memory is not there now, so values go through staging: %s", error)
        return None
    memory = PinnedMemory(view, span, swap.registrar, span_bytes=span)
    undo.callback(memory.close)
    log.info("%s: values are copied in its own memory, without staging", store.label)
    return InPlaceEnd(ends, swap, arena, memory, Split.of_arena(range_bytes))


def check_values_fit(store: Store, layout: Layout) -> None:
    """Raises ConfigError, with what to set, if the store can never take a block of the layout."""
    why = store.why_too_long(block.HEADER_BYTES + layout.largest_payload_bytes)
    if why is not None:
        raise ConfigError(
            f"{why}; or store blocks of less than {layout.block_tokens} tokens"
            " (PDSTORE_BLOCK_TOKENS, the same for P and D)"
        )
