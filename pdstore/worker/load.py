"""LoadWork: loads a prompt's blocks; each share is one block range."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pdstore.errors import Reason, StoreError, reason_of
from pdstore.format.values import BlockRange, Values
from pdstore.store.transfer import Move, ReadyEvent, Shortfall
from pdstore.worker.job import Share, Work, WorkerTurn
from pdstore.worker.mover import Mover
from pdstore.worker.values import PromptBlocks


@dataclass(eq=False)
class _Piece:
    """A block range of one layer range (None: of all layers), and how much of it is loaded.

    num_loaded: the number of leading values of the block range that are loaded.
    reached: the block range is loaded up to this number of tokens of the prompt.
    """

    blocks: BlockRange
    layer_range: int | None
    num_loaded: int = 0
    reached: int = 0


@dataclass(eq=False)
class LoadWork(Work):
    """Loads block ranges, in any order; only the tokens before the first gap count.

    A gap is a block that could not be loaded. A block counts when all its layer ranges are verified
    and copied. If a load has met a wrong value, at its end it reads all ranges that it did not load
    whole, and removes the wrong values in them, so that one save heals the prompt.

    first_token: the tokens before it are in the paged cache already.
    ready: an event that the copies wait for.
    """

    mover: Mover
    prompt: PromptBlocks
    first_token: int
    ready: ReadyEvent | None
    _waiting: deque[_Piece] = field(default_factory=deque, init=False)
    _released: dict[int | None, list[_Piece]] = field(default_factory=dict, init=False)
    _are_all: bool = field(default=False, init=False)  # True after `close`
    _cut: Reason | None = field(default=None, init=False)
    _gaps: list[tuple[_Piece, Shortfall]] = field(default_factory=list, init=False)

    @property
    def progress(self) -> int:
        ends = map(self._tokens_of, self._released.values())
        return self.prompt.usable_end(min(ends, default=self.first_token), self.first_token)

    @property
    def num_ready(self) -> int:
        if not self._gaps:
            return len(self._waiting)
        return sum(map(self._is_wanted, self._waiting))

    @property
    def is_at_end(self) -> bool:
        return self.num_ready == 0 and (self._are_all or bool(self._gaps))

    @property
    def is_open(self) -> bool:
        """True while more blocks may be released, and would be loaded. Takes `lock` itself."""
        with self.lock:
            return not (self._are_all or self._gaps)

    def release(self, ranges: Sequence[BlockRange], layer_range: int | None = None) -> None:
        """Lets the job load some blocks; call it in prompt order for each layer range.

        Does nothing after `close`.
        """
        pieces = [_Piece(blocks, layer_range) for blocks in ranges]
        with self.lock:
            if not self._are_all:
                self._released.setdefault(layer_range, []).extend(pieces)
                self._waiting += pieces

    def close(self, cut: Reason | None = None) -> None:
        """Ends the releases; later calls do nothing. cut: why blocks are missing, or None."""
        with self.lock:
            if not self._are_all:
                self._cut = cut
                self._are_all = True

    def next_share(self) -> Share:
        while not self._is_wanted(piece := self._waiting.popleft()):
            pass
        return partial(self._load, piece)

    def conclude(self, turn: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        """Returns the shortfall of the first gap in the prompt, which need not be first in time."""
        with self.lock:
            gaps, cut = list(self._gaps), self._cut
            released = [piece for pieces in self._released.values() for piece in pieces]
        if gaps:
            if any(gap.reason in self.mover.context.removed for _, gap in gaps):
                self._remove_wrong(turn, released)
            return min(gaps, key=lambda gap: self._block_at(gap[0]))[1]
        return Shortfall(cut) if shortfall is None and cut is not None else shortfall

    def _is_wanted(self, piece: _Piece) -> bool:
        """True if a block range begins before all gaps, because no block after a gap counts."""
        return all(piece.blocks.first < self._block_at(gap) for gap, _ in self._gaps)

    def _block_at(self, piece: _Piece) -> int:
        """Returns the first missing block of a block range that has a gap."""
        return max(piece.blocks.first, piece.reached // self.prompt.layout.block_tokens)

    def _load(self, piece: _Piece, turn: WorkerTurn) -> Reason | None:
        self.ready = self.mover.context.copies.device_event_or_wait(self.ready)
        values = self.prompt.values(piece.blocks, piece.layer_range)
        if not values:  # a sliding window has moved past these blocks
            with self.lock:
                piece.reached = self._end_of(piece)
            return None
        loaded = partial(self._note_loaded, piece, values)
        gap: Shortfall | None = None
        move = Move(values, self.ready, self.first_token)
        try:
            while move.values and gap is None:
                gap, rest = self.mover.transfer.load_window(turn, move, loaded)
                move = move._replace(values=rest)
        except StoreError as error:
            gap = Shortfall(reason_of(error), error)
        if gap is not None:
            turn.finish_copy()  # values of this copy lie before the gap, so they still count
            with self.lock:
                self._gaps.append((piece, gap))
        return None  # so the job goes on: other layer ranges are loaded up to the gap

    def _remove_wrong(self, turn: WorkerTurn, released: Sequence[_Piece]) -> None:
        with contextlib.suppress(StoreError):  # the load has a reason for its shortfall already
            for piece in released:
                if piece.reached < self._end_of(piece):
                    values = self.prompt.values(piece.blocks, piece.layer_range)
                    self.mover.remove_wrong(turn, values)

    def _note_loaded(
        self, piece: _Piece, wanted: Values, values: Values, why: Reason | None
    ) -> None:
        """Notes that values are loaded, if no value of `piece` before them is missing.

        wanted: all values of `piece`. why: the reason if the copy fell short, or None.
        """
        with self.lock:
            if values and values.numbers[0] == wanted.numbers[piece.num_loaded]:
                piece.num_loaded += len(values)
                piece.reached = self.prompt.keys.end_of(values.numbers[-1] + 1)
            if piece.num_loaded == len(wanted):
                piece.reached = self._end_of(piece)
            if why is not None:
                self._gaps.append((piece, Shortfall(why)))

    def _tokens_of(self, pieces: Sequence[_Piece]) -> int:
        """Returns the number of tokens before the first gap in one layer range."""
        tokens = self.first_token
        for piece in pieces:
            tokens = max(tokens, piece.reached)
            if piece.reached < self._end_of(piece):
                break
        return tokens

    def _end_of(self, piece: _Piece) -> int:
        return self.prompt.keys.end_of(piece.blocks.stop)
