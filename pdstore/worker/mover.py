"""Mover: carries values between the paged cache and the store, one share of a job at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from pdstore.errors import Cause, ConfigError, Reason, reasons_with
from pdstore.format import block
from pdstore.format.geometry import Geometry
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.format.plan import SavePlan
from pdstore.format.values import Values
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.admission import Admission
from pdstore.store.base import Store, count_of, stored_among
from pdstore.store.optional import (
    EvictsByUse,
    FindsKeys,
    RenewsUnread,
    TakesAdmission,
    TellsReads,
    meeting_store_of,
)
from pdstore.store.reading import read_values
from pdstore.store.seal import seal_store
from pdstore.store.transfer import HostMemory, MovesValues, Sealer, Split, Transfer, TransferContext
from pdstore.worker.job import WorkerTurn
from pdstore.worker.swap.base import Swap
from pdstore.worker.transfer.copies import SwapCopies
from pdstore.worker.transfer.staged import StagedTransfer
from pdstore.worker.transfer.staging import PinnedMemory, Staging


class Mover:
    """Moves the values of a job, on the thread of its worker.

    It moves whole blocks, from the first to the last. Only verified values count as loaded.

    transfer: the way in which values are moved to the store and back.
    by_use: the store, if it has the calls of `EvictsByUse`; else None.
    admission: decides whether a save may evict, and learns for that; None if nobody asks it.
    has_tiers: True if the store asks the admission, too: also about saves that others wait for.
    awaits_all: True if another instance waits for every save.
    """

    def __init__(
        self,
        context: TransferContext,
        transfer: Transfer,
        admission: Admission | None = None,
        *,
        awaits_all: bool = False,
    ) -> None:
        self.context = context
        self.transfer = transfer
        self.by_use = context.store.optional(EvictsByUse)
        self._meeting = meeting_store_of(context.store)
        self._finder = context.store.optional(FindsKeys)
        self._reads = context.store.optional(TellsReads)
        takes = context.store.optional(TakesAdmission)
        self.has_tiers = takes is not None
        self.admission = admission if self.by_use is not None or self.has_tiers else None
        if takes is not None and admission is not None:
            self.admission = takes.use_admission(admission)
        self._awaits_all = awaits_all or admission is None or self.by_use is None

    def is_awaited(self, plan: SavePlan) -> bool:
        """True if another instance waits for what a save stores, so that it may always evict."""
        return plan.is_handed_off or self._awaits_all

    def num_matched(
        self,
        turn: WorkerTurn,
        keys: Sequence[BlockKey],
        only_unread: tuple[int, float] | None = None,
    ) -> int:
        """Returns how many leading keys are stored; leases them.

        only_unread: arguments for `RenewsUnread.renew`, if the store has this call.
        """
        return _num_matched(turn, self.context.store, keys, only_unread)

    def num_readable(
        self,
        turn: WorkerTurn,
        plan: SavePlan,
        keys: Sequence[BlockKey],
        only_unread: tuple[int, float] | None = None,
    ) -> int:
        """Returns how many leading keys are stored where a save's readers look; leases them.

        D looks for what is handed off in the tier where P and D meet. All others look everywhere.
        only_unread: as in `num_matched`.
        """
        store = self._meeting if plan.is_handed_off else self.context.store
        return _num_matched(turn, store, keys, only_unread)

    def num_stored(self, turn: WorkerTurn, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading keys are stored; leases none if the store is FindsKeys."""
        if self._finder is None:
            return self.num_matched(turn, keys)
        with turn.in_store_call():
            stored = stored_among(self._finder.which_stored(keys), keys, self.context.store)
        return next((i for i, key in enumerate(keys) if key not in stored), len(keys))

    def tiers_read(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Returns from which tier each value was read last; nothing if the store has no tiers."""
        return self._reads.which_read(keys) if self._reads is not None else ()

    def remove_wrong(self, turn: WorkerTurn, values: Values) -> None:
        """Reads values and removes the wrong ones; loads nothing. Raises StoreError."""
        rest = values
        while rest:
            with self.transfer.slots(turn, rest.sizes) as slots:
                asked = rest[: len(slots)]
                if not asked:
                    turn.raise_if_over()
                    return
                read = read_values(self.context, turn, asked, slots)
            if read.shortfall is not None and read.shortfall.error is not None:
                raise read.shortfall.error
            rest = rest[min(read.num_read + 1, len(asked)) :]  # after the value that ended the read

    def mark(self, turn: WorkerTurn, markers: Mapping[BlockKey, block.Header]) -> Reason | None:
        """Stores markers, each only a header. Returns None if other processes can read them all."""
        keys = list(markers)
        sizes = [block.HEADER_BYTES] * len(keys)
        with self.transfer.slots(turn, sizes, len(keys)) as slots:
            if not len(slots):
                turn.raise_if_over()
                return Reason.NO_SLOTS
            for i, header in enumerate(markers.values()):
                block.seal(slots.value(i), header)
            with turn.in_store_call():
                self.context.store.put(keys, slots)
        return None if self.num_matched(turn, keys) == len(keys) else Reason.LOST


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
    check_values_fit(store, layout.geometry)
    heals = settings.publish and settings.role != "decode"
    # D does not remove values of another seal key: it does not save prompts again, and its own key
    # may be the wrong one
    removed = reasons_with(Cause.BAD_VALUE, *([Cause.SEALED] if heals else []))
    opener = _Opener(settings, swap, undo)
    context = TransferContext(
        layout.geometry,
        store,
        SwapCopies(layout.geometry, swap),
        metrics,
        removed,
        range_bytes,
        pin=opener.pin,
        staged=opener.staged,
        promotes=settings.publish,  # else this instance leaves nothing in the pool
    )
    moves = store.optional(MovesValues)
    transfer = moves.transfer(context) if moves is not None else None
    transfer = transfer or opener.staged(context, Split(range_bytes))
    awaits_all = settings.role == "prefill"  # D waits for all of P's
    asks = not awaits_all or store.optional(TakesAdmission) is not None
    return Mover(context, transfer, Admission() if asks else None, awaits_all=awaits_all)


class _Opener:
    """Opens what transfers ask their context for; `undo` unregisters their memory."""

    def __init__(self, settings: Settings, swap: Swap, undo: contextlib.ExitStack) -> None:
        self._settings = settings
        self._swap = swap
        self._undo = undo
        self._staging: Staging | None = None

    def pin(self, view: memoryview, span_bytes: int) -> HostMemory:
        """Registers memory with the device; jobs wait for that, the caller does not."""
        memory = PinnedMemory(view, span_bytes, self._swap.registrar, span_bytes=span_bytes)
        self._undo.callback(memory.close)
        return memory

    def staged(
        self, context: TransferContext, split: Split, sealer: Sealer | None = None
    ) -> StagedTransfer:
        """Opens the way through staging; several transfers of one pool share its slots."""
        if self._staging is None:
            self._staging = self._open_staging(context)
        return StagedTransfer(context, self._staging, split, sealer)

    def _open_staging(self, context: TransferContext) -> Staging:
        payload_bytes = context.geometry.largest_payload_bytes
        num_bytes = int(self._settings.staging)
        staging = Staging(context.store.allocate, payload_bytes, num_bytes, self._swap.registrar)
        metrics = context.metrics
        self._undo.callback(staging.memory.close)
        metrics.slots.set(staging.num_slots)
        metrics.slots_lent.set_function(lambda: staging.num_lent)
        self._undo.callback(metrics.slots_lent.set_function, lambda: 0)
        return staging


def _num_matched(
    turn: WorkerTurn,
    store: Store,
    keys: Sequence[BlockKey],
    only_unread: tuple[int, float] | None,
) -> int:
    """Does what `Mover.num_matched` says, in one store."""
    renewer = store.optional(RenewsUnread) if only_unread is not None else None
    with turn.in_store_call():
        if renewer is not None and only_unread is not None:
            found = renewer.renew(keys, *only_unread)
        else:
            found = store.match(keys)
        return count_of(found, keys, store)


def check_values_fit(store: Store, geometry: Geometry) -> None:
    """Raises ConfigError, with what to set, if the store can never take a block of the pool."""
    size = geometry.block_tokens
    largest = max(geometry.parts.values(), key=lambda part: part.payload_bytes(size))
    why = store.why_too_long(block.HEADER_BYTES + largest.payload_bytes(size))
    if why is not None:
        remedy = f"store blocks of less than {size} tokens (PDSTORE_BLOCK_TOKENS"
        if largest.cache.cell_tokens is None:  # of any block: a state has as many bytes
            remedy = (
                f"store the states of less than {len(largest.layers)} layers together (a larger"
                " PDSTORE_LAYER_RANGES"
            )
        raise ConfigError(f"{why}; or {remedy}, the same for P and D)")
