"""SaveWork: what a save does. MarkWork: stores markers alone."""

# Decision: docs/decisions/020-saves-behind-launch.md, docs/decisions/041-admission.md
from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdstore.errors import Reason, StoreError, StoreFull
from pdstore.format import block
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import BlockKey
from pdstore.format.plan import SavePlan
from pdstore.format.values import BlockRange, Values
from pdstore.store.transfer import Move, ReadyEvent, Shortfall
from pdstore.worker.job import Work, WorkerTurn, WorkItem
from pdstore.worker.mover import Mover
from pdstore.worker.values import PromptBlocks, bytes_of

_MAX_ROUNDS = 3


@dataclass(eq=False)
class _SaveRange(WorkItem):
    """Blocks of one layer range (None: of all layers)."""

    blocks: BlockRange
    layer_range: int | None


@dataclass(eq=False)
class SaveWork(Work[_SaveRange]):
    """Saves blocks; then one match of all of them says how many another process can load.

    A save without a hand-off skips the leading blocks that are stored when it begins, and matches
    only its own blocks at the end. A save with a hand-off matches the whole prompt at the end,
    saves again what the store lost meanwhile, and then tells D.

    Drafts are saved where they can be: whether or not they are stored decides nothing. A draft's
    value of a block is left out if a row in it may be an earlier request's (`drafts_from`).

    prompt: the blocks of `plan.keys`.
    """

    mover: Mover
    prompt: PromptBlocks
    plan: SavePlan
    _decided: tuple[int, bool] | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)  # True: all blocks are released
    _num_copying: int = field(default=0, init=False)  # released and not copied yet
    _ready: ReadyEvent | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._at_once = self.mover.transfer.split.at_once
        self._is_awaited = self.mover.is_awaited(self.plan)
        self._asked_at = time.monotonic() - self.plan.waited_s

    @property
    def first_block(self) -> int:
        """The blocks before it are stored already, or are being saved."""
        return self.plan.first_token // self.prompt.layout.block_tokens

    def release(
        self,
        ranges: Sequence[BlockRange],
        ready: ReadyEvent | None,
        *,
        layer_range: int | None = None,
        is_last: bool = True,
    ) -> None:
        """Lets the job read some layers of the blocks after the event `ready` has fired."""
        with self.lock:
            self._ready = ready
            self._is_closed = is_last
            self._num_copying += len(ranges)
            self._waiting += [_SaveRange(blocks, layer_range, ready=ready) for blocks in ranges]

    def conclude(self, turn: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        if self.plan.handoff is not None:
            return self._publish(turn, self.plan.handoff, shortfall)
        turn.set_captured()
        missing = self._first_missing(turn, self.first_block, shortfall)
        if missing is not None:
            return shortfall or Shortfall(Reason.LOST)
        if not self.plan.is_handed_off:  # the match before `done` counts a use of the whole prompt
            self._count_use(turn)
        return None

    def _count_use(self, turn: WorkerTurn) -> None:
        """Counts a use of the saved blocks; after a prompt's last save, of all of its blocks.

        Otherwise a full store would evict the first blocks before the later ones, which cannot be
        used without them. An error is no failure: all is stored.
        """
        by_use = self.mover.by_use
        if by_use is None:
            return
        first_block = 0 if self.plan.ends_prompt else self.first_block
        parts = self.prompt.layout.parts_of[None]  # a draft's, used before, go before them
        keys = self.prompt.keys.store_keys(parts, first_block)
        with contextlib.suppress(StoreError), turn.in_store_call():
            by_use.use(keys)

    def _move(self, items: Sequence[_SaveRange], turn: WorkerTurn) -> Reason | None:
        first, is_admitted = self._decide(turn)
        if not is_admitted:
            return Reason.NOT_ADMITTED
        moves = []
        for item in items:
            ready = self.mover.context.copies.device_event_or_wait(item.ready)
            is_draft = item.layer_range == self.prompt.layout.draft_range is not None
            stop = item.blocks.stop
            begin = max(item.blocks.first, first, self._first_own_draft if is_draft else 0)
            values = self.prompt.values(BlockRange(min(begin, stop), stop), item.layer_range)
            if not values:
                self._note_copied(turn)
            elif is_draft:
                self._save_drafts(turn, Move(values, ready))
            else:
                moves.append(Move(values, ready, on_store_error=partial(self._makes_room, turn)))
        if not moves:
            return None
        reason = self.mover.transfer.save(turn, moves, partial(self._note_copied, turn))
        if reason is None and self.plan.handoff is not None:
            for move in moves:  # because D loads them later
                self._num_leased(turn, move.values)
        return reason

    @property
    def _first_own_draft(self) -> int:
        """The first block whose rows in a draft's cache are all of this request."""
        # a row of a draft's second layer depends on all rows before it, so one row of another
        # request makes all later ones useless: then no block is saved
        identity, start = self.prompt.layout.identity, self.plan.drafts_from
        if start and len(identity.layers) - len(identity.needed_layers) > 1:
            return len(self.prompt.keys)
        return -(-start // identity.block_tokens)

    def _save_drafts(self, turn: WorkerTurn, move: Move) -> None:
        """Saves drafts as far as the store takes them; D can do without."""
        with contextlib.suppress(StoreError):
            self.mover.transfer.save(turn, [move], partial(self._note_copied, turn))

    def _decide(self, turn: WorkerTurn) -> tuple[int, bool]:
        """Decides which block is the first to save, and whether the save may evict.

        The first share decides for all.
        """
        if self._decided is None:
            first = self.first_block
            if self.plan.handoff is None:
                first = self._first_not_stored(turn)
            elif self.mover.has_tiers:
                # A hand-off is not matched before it is saved, lest it wait for a tier. So what the
                # lookup found counts as found and the save's own blocks as new, although one that
                # P computes again, as a prompt's last, may be stored.
                self._learn_uses(first)
            is_done = first == len(self.prompt.keys)
            decided = first, self._is_awaited or is_done or self._is_worth_it(turn, first)
            with self.lock:
                self._decided = self._decided or decided
        return self._decided

    def _first_not_stored(self, turn: WorkerTurn) -> int:
        """Matches the save's blocks, and tells the admission that they are used."""
        values, num_blocks = self.prompt.values_from(self.first_block), len(self.prompt.keys)
        num_stored = self.mover.num_readable(turn, self.plan, values.keys)
        first = values.numbers[num_stored] if num_stored < len(values) else num_blocks
        self._learn_uses(first)
        return first

    def _learn_uses(self, first: int) -> None:
        """Tells the admission that the blocks before `first` were found, and the others were not.

        A later save of a prompt tells nothing of the blocks that an earlier one has told of.
        """
        admission = self.mover.admission
        if admission is not None:
            keys = self.prompt.keys
            used = 0 if self._is_first else self.first_block
            waited_s = time.monotonic() - self._asked_at
            admission.found(keys.hashes(used, first), waited_s)
            admission.saved(keys.hashes(first, len(keys)), waited_s)

    def _makes_room(self, turn: WorkerTurn, error: StoreError) -> bool:
        """Makes a full store evict, even leased values, for what it lacks of an awaited prompt."""
        by_use, values = self.mover.by_use, self.prompt.values_from(0)
        if by_use is None or not isinstance(error, StoreFull) or not self._is_awaited:
            return False
        with turn.in_store_call():
            return by_use.make_room(values.keys, values.sizes)

    def _is_worth_it(self, turn: WorkerTurn, first: int) -> bool:
        """True if there is room, or if the admission agrees and the block before is stored."""
        admission, by_use = self.mover.admission, self.mover.by_use
        if admission is None or by_use is None:
            return True
        with turn.in_store_call():
            oldest_s = by_use.oldest_age_s(self.prompt.values_from(first).sizes)
        if oldest_s is None or not admission.admits(oldest_s):
            return oldest_s is None
        before = self.prompt.values(BlockRange(max(0, first - 1), first)).keys
        return self._is_first or not before or self.mover.num_matched(turn, before) == len(before)

    @property
    def _is_first(self) -> bool:
        """True for a prompt's first save: others have saved the blocks before it, or save them."""
        size = self.prompt.layout.block_tokens
        first = self.plan.first_save
        return first is not None and first.first_token // size == self.first_block

    def _num_leased(self, turn: WorkerTurn, values: Values) -> int:
        """Returns how many leading values are stored; leases what D has not read yet."""
        if self.plan.first_save is None:
            return self.mover.num_readable(turn, self.plan, values.keys)
        first_block = self.plan.first_save.first_token // self.prompt.layout.block_tokens
        first = bisect_left(values.numbers, first_block)
        since = first, self.plan.first_save.began
        return self.mover.num_readable(turn, self.plan, values.keys, since)

    def _note_copied(self, turn: WorkerTurn) -> None:
        """Counts a copied block range; after the last one, a save without hand-off is captured."""
        with self.lock:
            self._num_copying -= 1
            is_captured = self._is_closed and not self._num_copying and self.plan.handoff is None
        if is_captured:
            turn.set_captured()

    def _publish(
        self, turn: WorkerTurn, handoff: HandoffId, shortfall: Shortfall | None
    ) -> Shortfall | None:
        """Saves again the blocks that D would not find; tells D when the prompt is durable."""
        for saves_left in reversed(range(_MAX_ROUNDS)):
            missing = self._first_missing(turn, 0, shortfall)
            if missing is None:
                return self._mark_stored(turn, handoff)
            # layers that are not released may not be computed yet, so they cannot be saved
            if shortfall is not None and (shortfall.error is not None or not self._is_closed):
                return shortfall
            if saves_left:
                reason = self._save_again(turn, missing)
                shortfall = None if reason is None else Shortfall(reason)
        return shortfall or Shortfall(Reason.LOST)

    def _save_again(self, turn: WorkerTurn, first_block: int) -> Reason | None:
        """Saves the blocks from `first_block` on again, range by range; `put` skips stored ones."""
        keys, ready = self.prompt.keys, self.mover.context.copies.device_event_or_wait(self._ready)
        num_bytes = bytes_of(self.prompt.layout, keys, first_block)
        for blocks in self.mover.transfer.split.ranges(first_block, len(keys), num_bytes):
            values, makes_room = self.prompt.values(blocks), partial(self._makes_room, turn)
            move = Move(values, ready, on_store_error=makes_room)
            reason = self.mover.transfer.save(turn, [move], lambda: None)
            if reason is not None:
                return reason
        return None

    def _first_missing(
        self, turn: WorkerTurn, first_block: int, shortfall: Shortfall | None
    ) -> int | None:
        """Matches the blocks from `first_block` on; sets `progress` to the tokens that are stored.

        Returns the first block that is not stored whole; None if all are. If the save has a
        shortfall already, no StoreError of the match is raised, so that the first reason stays.
        """
        values, keys = self.prompt.values_from(first_block), self.prompt.keys
        try:
            if self._is_awaited:
                stored = self._num_leased(turn, values)
            else:
                stored = self.mover.num_stored(turn, values.keys)
        except StoreError:
            if shortfall is None:
                raise
            stored = 0
        missing = values.numbers[stored] if stored < len(values) else None
        self._progress = keys.num_tokens if missing is None else keys.end_of(missing)
        return missing

    def _mark_stored(self, turn: WorkerTurn, handoff: HandoffId) -> Shortfall | None:
        """Tells D that this rank's shards are durable, if all pipeline stages have stored theirs.

        Each stage first puts its own marker and then matches the markers of all stages, so that the
        last stage finds them all.
        """
        layout, namespace = self.prompt.layout, self.prompt.keys.namespace
        shards, stages = layout.owned_shards, range(layout.num_stages)
        if layout.pipeline is not None:
            own = {n: handoff.stage_done(namespace, n, layout.pipeline.stage) for n in shards}
            if (reason := self._mark(turn, handoff, own)) is not None:
                return Shortfall(reason)
            ends = [handoff.stage_done(namespace, n, stage) for n in shards for stage in stages]
            if self.mover.num_matched(turn, ends) < len(ends):
                return None
        reason = self._mark(turn, handoff, {n: handoff.done(namespace, n) for n in shards})
        return None if reason is None else Shortfall(reason)

    def _mark(
        self, turn: WorkerTurn, handoff: HandoffId, keys: Mapping[int, BlockKey]
    ) -> Reason | None:
        """Puts markers under the keys of some shards."""
        namespace = self.prompt.keys.namespace
        markers = {
            key: handoff.marker(namespace, shard, namespace.num_shards, self._progress)
            for shard, key in keys.items()
        }
        return self.mover.mark(turn, markers)


@dataclass(eq=False)
class MarkWork(Work[WorkItem]):
    """Stores markers of a hand-off, and nothing else."""

    mover: Mover
    markers: Mapping[BlockKey, block.Header]

    def conclude(self, turn: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        reason = self.mover.mark(turn, self.markers)
        return None if reason is None else Shortfall(reason)
