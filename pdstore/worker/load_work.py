"""LoadWork: loads a prompt's blocks, a range a share."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from itertools import chain

from pdstore.errors import StoreError
from pdstore.outcome import Reason, reason_of
from pdstore.worker.block_range import BlockRange
from pdstore.worker.child_job import ChildJob
from pdstore.worker.mover import Mover
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.values import PromptBlocks, Value, block_at, end_token
from pdstore.worker.work import Share, Shortfall, Work


class _Piece:
    """Blocks of one layer range (None: of all layers), and how far they are loaded."""

    def __init__(self, blocks: BlockRange, layer_range: int | None) -> None:
        self.blocks, self.layer_range = blocks, layer_range
        self.num_loaded = 0  # values, without a gap before them
        self.reached = 0  # tokens of the prompt


class LoadWork(Work):
    """Loads ranges of blocks, which end in any order; the tokens before the first gap count.

    A block counts when all its layer ranges are verified and copied. A load that met a wrong value
    ends with a look at all that it did not load: what else is wrong is removed as well, so that one
    save heals the prompt.

    first_token: of the prompt; those before it are there already.
    ready: the copies wait on it.
    """

    def __init__(
        self, mover: Mover, prompt: PromptBlocks, first_token: int, ready: ReadyEvent | None
    ) -> None:
        self._mover, self._prompt = mover, prompt
        self._first_token, self._ready = first_token, ready
        self._waiting: deque[_Piece] = deque()
        self._released: defaultdict[int | None, list[_Piece]] = defaultdict(list)
        self._tally = (0, False)  # pieces released, and whether those are all: one value
        self._num_taken = 0
        self._cut: Reason | None = None
        self._gaps: list[tuple[_Piece, Shortfall]] = []

    @property
    def progress(self) -> int:
        ends = map(self._tokens_of, list(self._released.values()))
        return self._prompt.usable_end(min(ends, default=self._first_token), self._first_token)

    @property
    def num_ready(self) -> int:
        if not self._gaps:
            return len(self._waiting)
        return sum(self._is_wanted(piece) for piece in list(self._waiting))

    @property
    def is_at_end(self) -> bool:
        if self._gaps:
            return self.num_ready == 0
        return self._tally == (self._num_taken, True)

    @property
    def is_open(self) -> bool:
        """True while it matters whether more is released."""
        return not (self._tally[1] or self._gaps)

    def release(self, ranges: Sequence[BlockRange], layer_range: int | None = None) -> None:
        """Says that some blocks may be loaded; those of a layer range in the prompt's order.

        One thread at a time calls this and `close`. After `close` neither does anything.
        """
        num_released, are_all = self._tally
        if are_all:
            return
        pieces = [_Piece(blocks, layer_range) for blocks in ranges]
        self._tally = (num_released + len(pieces), False)
        self._released[layer_range] += pieces
        self._waiting += pieces

    def close(self, cut: Reason | None = None) -> None:
        """Says that no more is released; `cut`: why that is not all of the prompt."""
        num_released, are_all = self._tally
        if not are_all:
            self._cut = cut
            self._tally = (num_released, True)

    def take(self) -> Share:
        while self._waiting:
            piece = self._waiting.popleft()
            self._num_taken += 1
            if self._is_wanted(piece):
                return partial(self._load, piece)
        return _nothing  # another worker has found a gap since the run counted the shares

    def finish(self, child: ChildJob, shortfall: Shortfall | None) -> Shortfall | None:
        """Returns the shortfall of the first gap in the prompt, which need not be the first."""
        if self._gaps:
            if any(self._mover.removes(gap.reason) for _, gap in self._gaps):
                self._remove_wrong(child)
            return min(self._gaps, key=lambda gap: self._block_at(gap[0]))[1]
        if shortfall is None and self._cut is not None:
            shortfall = Shortfall(self._cut)
        return shortfall

    def _is_wanted(self, piece: _Piece) -> bool:
        """True if a piece may add tokens: behind a gap nothing counts."""
        return all(piece.blocks.first < self._block_at(gap) for gap, _ in self._gaps)

    def _block_at(self, piece: _Piece) -> int:
        """Returns the first block that is missing in a piece with a gap."""
        return max(piece.blocks.first, piece.reached // self._prompt.layout.block_tokens)

    def _load(self, piece: _Piece, child: ChildJob) -> Reason | None:
        self._ready = self._mover.to_follow(self._ready)
        values = self._prompt.values(piece.blocks, piece.layer_range)
        if not values:  # a window has moved on
            piece.reached = self._prompt.keys.end_of(piece.blocks.stop)
            return None
        loaded = partial(self._note_loaded, piece, values)
        gap: Shortfall | None = None
        try:
            reason = self._mover.load(child, values, self._first_token, self._ready, loaded)
            gap = None if reason is None else Shortfall(reason)
        except StoreError as error:
            gap = Shortfall(reason_of(error), error)
        if gap is not None:
            child.finish_copy()  # the gap begins behind it, and what comes before is still wanted
            self._gaps.append((piece, gap))
        return None  # what lies before the gap in other layer ranges is loaded all the same

    def _remove_wrong(self, child: ChildJob) -> None:
        released = chain.from_iterable(self._released.values())
        with contextlib.suppress(StoreError):  # the load has its reason already
            for piece in released:
                if piece.reached < self._prompt.keys.end_of(piece.blocks.stop):
                    values = self._prompt.values(piece.blocks, piece.layer_range)
                    self._mover.remove_wrong(child, values)

    def _note_loaded(
        self, piece: _Piece, wanted: Sequence[Value], values: Sequence[Value], why: Reason | None
    ) -> None:
        """Notes that some values are in place; behind a copy that fell short or failed none counts.

        wanted: all values of the piece. why: the reason why the copy fell short.
        """
        if values and block_at(values, 0) == block_at(wanted, piece.num_loaded):
            piece.num_loaded += len(values)
            piece.reached = end_token(values, self._prompt.layout.block_tokens)
        if piece.num_loaded == len(wanted):
            piece.reached = self._prompt.keys.end_of(piece.blocks.stop)
        if why is not None:
            self._gaps.append((piece, Shortfall(why)))

    def _tokens_of(self, pieces: Sequence[_Piece]) -> int:
        """The tokens before the first gap in one layer range."""
        tokens, keys = self._first_token, self._prompt.keys
        for piece in list(pieces):
            tokens = max(tokens, piece.reached)
            if piece.reached < keys.end_of(piece.blocks.stop):
                break
        return tokens


def _nothing(child: ChildJob) -> None:
    pass
