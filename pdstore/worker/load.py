"""LoadWork: loads a prompt's blocks; each share is one block range."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdstore.errors import Reason, StoreError, reason_of
from pdstore.format.values import BlockRange, Values
from pdstore.store.tier_spans import spans_by_block, tokens_by_tier
from pdstore.store.transfer import Move, ReadyEvent, Shortfall
from pdstore.worker.job import Work, WorkerTurn, WorkItem
from pdstore.worker.mover import Mover
from pdstore.worker.values import PromptBlocks, bytes_of


@dataclass(eq=False)
class _LoadRange(WorkItem):
    """A block range of one layer range (None: of all layers), and how much of it is loaded.

    num_loaded: the number of leading values of the block range that are loaded.
    reached: the block range is loaded up to this number of tokens of the prompt.
    """

    blocks: BlockRange
    layer_range: int | None
    is_draft: bool = False
    num_loaded: int = 0
    reached: int = 0


@dataclass(eq=False)
class LoadWork(Work[_LoadRange]):
    """Loads block ranges, in any order; only the tokens before the first gap count.

    A gap is a block that could not be loaded. A block counts when all its layer ranges are verified
    and copied. If a load has met a wrong value, at its end it reads all ranges that it did not load
    whole, and removes the wrong values in them, so that one save heals the prompt.

    When all blocks are released, drafts are loaded too, up to the first block (a tail is one) that
    has none: behind a gap, a draft with full attention would use rows that are of no prompt. Of
    drafts nothing is a shortfall: the draft's model is then cold, and proposes worse tokens.

    first_token: the tokens before it are in the paged cache already.
    ready: an event that the copies wait for.
    """

    mover: Mover
    prompt: PromptBlocks
    first_token: int
    ready: ReadyEvent | None
    _released: dict[int | None, list[_LoadRange]] = field(default_factory=dict, init=False)
    _is_closed: bool = field(default=False, init=False)  # True after `close`, or after a gap
    _cut: Reason | None = field(default=None, init=False)
    _gaps: list[tuple[_LoadRange, Shortfall]] = field(default_factory=list, init=False)
    _tiers: dict[int, int] = field(default_factory=dict, init=False)  # the slowest, by block
    _drafts: list[_LoadRange] = field(default_factory=list, init=False)
    _wrong_drafts: list[_LoadRange] = field(default_factory=list, init=False)

    @property
    def progress(self) -> tuple[int, int, Mapping[int, int]]:
        ends = map(self._tokens_of, self._released.values())
        end = self.prompt.usable_end(min(ends, default=self.first_token), self.first_token)
        has_drafts = self.prompt.layout.draft_range is not None
        num_with_drafts = min(end, self._tokens_of(self._drafts)) if has_drafts else end
        return end, num_with_drafts, self._by_tier(end)

    def _by_tier(self, end: int) -> Mapping[int, int]:
        """Returns how many tokens, up to `end`, came from each tier; none without tiers."""
        if not self._tiers:
            return {}
        tiers = (self._tiers.get(number, 0) for number in range(max(self._tiers) + 1))
        return tokens_by_tier(spans_by_block(self.prompt.keys, tiers), self.first_token, end)

    @property
    def is_open(self) -> bool:
        """True while more blocks may be released, and would be loaded. Takes `lock` itself."""
        with self.lock:
            return not self._is_closed

    def release(self, ranges: Sequence[BlockRange], layer_range: int | None = None) -> None:
        """Lets the job load some blocks; call it in prompt order for each layer range.

        Does nothing after `close` or a gap.
        """
        items = [_LoadRange(blocks, layer_range) for blocks in ranges]
        with self.lock:
            if not self._is_closed:
                self._released.setdefault(layer_range, []).extend(items)
                self._waiting += items

    def close(self, cut: Reason | None = None) -> None:
        """Ends the releases; later calls do nothing. cut: why blocks are missing, or None."""
        drafts = self._draft_ranges() if cut is None else []
        with self.lock:
            if not self._is_closed:
                self._cut = cut
                self._is_closed = True
                self._drafts = drafts
                self._waiting += drafts

    def _draft_ranges(self) -> list[_LoadRange]:
        layout, keys, split = self.prompt.layout, self.prompt.keys, self.mover.transfer.split
        number = layout.draft_range
        if number is None:
            return []
        first = self.first_token // layout.block_tokens
        ranges = split.ranges(first, len(keys), bytes_of(layout, keys, first, number))
        return [_LoadRange(blocks, number, is_draft=True) for blocks in ranges]

    def conclude(self, turn: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        """Returns the shortfall of the first gap in the prompt, which need not be first in time."""
        with self.lock:
            gaps, cut = list(self._gaps), self._cut
            released = [item for items in self._released.values() for item in items]
            wrong_drafts = list(self._wrong_drafts)
        self._remove_wrong(turn, wrong_drafts)
        if gaps:
            if any(gap.reason in self.mover.context.removed for _, gap in gaps):
                self._remove_wrong(turn, released)
            return min(gaps, key=lambda gap: self._block_at(gap[0]))[1]
        return Shortfall(cut) if shortfall is None and cut is not None else shortfall

    def _note_gap(self, item: _LoadRange, gap: Shortfall) -> None:
        """Drops the block ranges behind a gap, where no block counts. The caller holds `lock`.

        Behind a gap of the drafts only theirs are dropped.
        """
        missing = self._block_at(item)
        if not item.is_draft:
            self._gaps.append((item, gap))
            self._is_closed = True
        elif gap.reason in self.mover.context.removed:
            self._wrong_drafts.append(item)
        self._waiting = deque(
            each
            for each in self._waiting
            if each.blocks.first < missing or (item.is_draft and not each.is_draft)
        )

    def _block_at(self, item: _LoadRange) -> int:
        """Returns the first missing block of a block range that has a gap."""
        return max(item.blocks.first, item.reached // self.prompt.layout.block_tokens)

    def _move(self, items: Sequence[_LoadRange], turn: WorkerTurn) -> Reason | None:
        for item in items:
            self._load(item, turn)
        return None  # so the job goes on: other layer ranges are loaded up to a gap

    def _load(self, item: _LoadRange, turn: WorkerTurn) -> None:
        self.ready = self.mover.context.copies.device_event_or_wait(self.ready)
        values = self.prompt.values(item.blocks, item.layer_range)
        if not values:  # a sliding window has moved past these blocks
            with self.lock:
                item.reached = self._end_of(item)
            return
        loaded = partial(self._note_loaded, item, values)
        gap: Shortfall | None = None
        try:
            there = self._draft_values(turn, values) if item.is_draft else values
            move = Move(there, self.ready, self.first_token)
            while move.values and gap is None:
                gap, rest = self.mover.transfer.load_window(turn, move, loaded)
                move = move._replace(values=rest)
            if gap is None and len(there) < len(values):
                gap = Shortfall(Reason.ABSENT)
        except StoreError as error:
            gap = Shortfall(reason_of(error), error)
        if gap is not None:
            turn.finish_copy()  # values of this copy lie before the gap, so they still count
            with self.lock:
                self._note_gap(item, gap)

    def _draft_values(self, turn: WorkerTurn, values: Values) -> Values:
        """Returns those of a draft's values that are stored, up to the first block with a gap."""
        turn.finish_copy()  # else a call that hangs would keep the model's tokens from counting
        return values[: values.num_whole(self.mover.num_matched(turn, values.keys))]

    def _remove_wrong(self, turn: WorkerTurn, released: Sequence[_LoadRange]) -> None:
        with contextlib.suppress(StoreError):  # the load has a reason for its shortfall already
            for item in released:
                if item.reached < self._end_of(item):
                    values = self.prompt.values(item.blocks, item.layer_range)
                    self.mover.remove_wrong(turn, values)

    def _note_loaded(
        self, item: _LoadRange, wanted: Values, values: Values, why: Reason | None
    ) -> None:
        """Notes that values are loaded, if no value of `item` before them is missing.

        wanted: all values of `item`. why: the reason if the copy fell short, or None.
        """
        tiers = self.mover.tiers_read(values.keys)
        with self.lock:
            for number, tier in zip(values.numbers, tiers, strict=False):
                self._tiers[number] = max(tier, self._tiers.get(number, 0))
            if values and values.numbers[0] == wanted.numbers[item.num_loaded]:
                item.num_loaded += len(values)
                item.reached = self.prompt.keys.end_of(values.numbers[-1] + 1)
            if item.num_loaded == len(wanted):
                item.reached = self._end_of(item)
            if why is not None:
                self._note_gap(item, Shortfall(why))

    def _tokens_of(self, items: Sequence[_LoadRange]) -> int:
        """Returns the number of tokens before the first gap in one layer range."""
        tokens = self.first_token
        for item in items:
            tokens = max(tokens, item.reached)
            if item.reached < self._end_of(item):
                break
        return tokens

    def _end_of(self, item: _LoadRange) -> int:
        return self.prompt.keys.end_of(item.blocks.stop)
