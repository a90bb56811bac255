"""SaveWork: saves a prompt's blocks, some ranges a share, and checks that they are durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pdstore.errors import StoreError
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason
from pdstore.worker.block_range import BlockRange
from pdstore.worker.child_job import ChildJob
from pdstore.worker.movers import Mover
from pdstore.worker.store_ends import Source
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.values import PromptBlocks, bytes_of
from pdstore.worker.work import Share, Shortfall, Work

_MOST_ROUNDS = 3


class _Piece(NamedTuple):
    """Blocks of one layer range (None: of all layers) and the event that their copies follow."""

    blocks: BlockRange
    layer_range: int | None
    ready: ReadyEvent | None


class SaveWork(Work):
    """Saves blocks; then one match of all of them says how many another process can load.

    A plain save skips what is stored and matches its own blocks. With a hand-off the match is of
    the whole prompt: what the store lost meanwhile is saved again, and D is told at the end.

    first_block: the blocks before it are stored or on their way already.
    handoff: publish the whole prompt under this name.
    """

    def __init__(
        self,
        mover: Mover,
        prompt: PromptBlocks,
        first_block: int,
        handoff: HandoffId | None = None,
    ) -> None:
        self._mover, self._prompt, self._handoff = mover, prompt, handoff
        self.first_block = first_block
        self._pieces: deque[_Piece] = deque()
        self._tally = (0, False)  # pieces released, and whether those are all: one value
        self._num_taken = 0
        self._gathered: list[None] = []
        self._progress = 0
        self._ready: ReadyEvent | None = None

    @property
    def progress(self) -> int:
        return self._progress

    @property
    def num_ready(self) -> int:
        return -(-len(self._pieces) // self._mover.split.at_once)

    @property
    def is_at_end(self) -> bool:
        return self._tally == (self._num_taken, True)

    def release(
        self,
        ranges: Sequence[BlockRange],
        ready: ReadyEvent | None,
        *,
        layer_range: int | None = None,
        is_last: bool = True,
    ) -> None:
        """Says that some layers of the blocks may be read once `ready` has fired."""
        pieces = [_Piece(blocks, layer_range, ready) for blocks in ranges]
        self._ready = ready
        self._tally = (self._tally[0] + len(pieces), is_last)
        self._pieces.extend(pieces)

    def take(self) -> Share:
        count = min(self._mover.split.at_once, len(self._pieces))
        self._num_taken += count
        return partial(self._save, [self._pieces.popleft() for _ in range(count)])

    def finish(self, child: ChildJob, shortfall: Shortfall | None) -> Shortfall | None:
        if self._handoff is not None:
            return self._publish(child, self._handoff, shortfall)
        child.set_captured()
        missing = self._first_missing(child, self.first_block, shortfall)
        return None if missing is None else shortfall or Shortfall(Reason.LOST)

    def _save(self, pieces: Sequence[_Piece], child: ChildJob) -> Reason | None:
        sources = [source for piece in pieces if (source := self._source(piece, child)).values]
        for _ in range(len(sources), len(pieces)):
            self._note_gathered(child)
        if not sources:
            return None
        reason = self._mover.save(child, sources, partial(self._note_gathered, child))
        if reason is None and self._handoff is not None:
            for values, _ in sources:  # a lease: D comes for them, also when all is late
                self._mover.num_matched(child, values.keys)
        return reason

    def _source(self, piece: _Piece, child: ChildJob) -> Source:
        """Returns what is to be saved of a piece."""
        ready = self._mover.to_follow(piece.ready)
        values = self._prompt.values(piece.blocks, piece.layer_range)
        if self._handoff is None:
            values = values[self._mover.num_matched(child, values.keys) :]
        return Source(values, ready)

    def _note_gathered(self, child: ChildJob) -> None:
        """Counts the pieces that are copied; a hand-off's may be needed again."""
        self._gathered.append(None)
        if self._tally == (len(self._gathered), True) and self._handoff is None:
            child.set_captured()

    def _publish(
        self, child: ChildJob, handoff: HandoffId, shortfall: Shortfall | None
    ) -> Shortfall | None:
        """Saves what the store lost meanwhile; tells D when all is durable."""
        for saves_left in reversed(range(_MOST_ROUNDS)):
            missing = self._first_missing(child, 0, shortfall)
            if missing is None:
                return self._mark_stored(child, handoff)
            # layers that are not released may not be computed: they are not there to be saved again
            if shortfall is not None and (shortfall.error is not None or not self._tally[1]):
                return shortfall
            if saves_left:
                reason = self._save_again(child, missing)
                shortfall = None if reason is None else Shortfall(reason)
        return shortfall or Shortfall(Reason.LOST)

    def _save_again(self, child: ChildJob, first_block: int) -> Reason | None:
        """Saves what the store lost of the blocks from `first_block` on, range by range."""
        prompt, ready = self._mover.checked(self._prompt), self._mover.to_follow(self._ready)
        num_bytes = bytes_of(prompt.layout, prompt.keys, first_block)
        for blocks in self._mover.split.ranges(first_block, len(prompt.keys), num_bytes):
            reason = self._mover.save(child, [Source(prompt.values(blocks), ready)], _nothing)
            if reason is not None:
                return reason
        return None

    def _first_missing(
        self, child: ChildJob, first_block: int, shortfall: Shortfall | None
    ) -> int | None:
        """Matches the blocks from `first_block` on; says in `progress` how far they go.

        Returns the first block that is not whole in the store; None if all are. A store that fails
        at this too does not hide why the save fell short.
        """
        chain, keys = self._prompt.chain(first_block), self._prompt.keys
        try:
            stored = self._mover.num_matched(child, chain.keys)
        except StoreError:
            if shortfall is None:
                raise
            stored = 0
        missing = chain.numbers[stored] if stored < len(chain.keys) else None
        self._progress = keys.num_tokens if missing is None else keys.end_of(missing)
        return missing

    def _mark_stored(self, child: ChildJob, handoff: HandoffId) -> Shortfall | None:
        """Tells D that this rank's shards are durable, once all pipeline stages of them are.

        Each stage marks its own end first and then looks for the others', so the last one sees all.
        """
        layout, namespace = self._prompt.layout, self._prompt.keys.namespace
        shards, stages = layout.owned_shards, range(layout.num_stages)
        if layout.pipeline is not None:
            own = {n: handoff.stage_done(namespace, n, layout.pipeline.stage) for n in shards}
            if (reason := self._mark(child, handoff, own)) is not None:
                return Shortfall(reason)
            ends = [handoff.stage_done(namespace, n, stage) for n in shards for stage in stages]
            if self._mover.num_matched(child, ends) < len(ends):
                return None
        reason = self._mark(child, handoff, {n: handoff.done(namespace, n) for n in shards})
        return None if reason is None else Shortfall(reason)

    def _mark(
        self, child: ChildJob, handoff: HandoffId, keys: Mapping[int, BlockKey]
    ) -> Reason | None:
        """Puts markers under the keys of some shards."""
        namespace, num_shards = self._prompt.keys.namespace, self._prompt.layout.grid_shards
        return self._mover.mark(
            child,
            {
                key: handoff.marker(namespace, shard, num_shards, self._progress)
                for shard, key in keys.items()
            },
        )


def _nothing() -> None:
    pass
