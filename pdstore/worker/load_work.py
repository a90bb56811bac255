"""LoadWork: loads a prompt's blocks, a range a share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pdstore.errors import StoreError
from pdstore.outcome import Reason, reason_of
from pdstore.worker.block_range import BlockRange
from pdstore.worker.child_job import ChildJob
from pdstore.worker.mover import Mover
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.values import PromptBlocks, Value
from pdstore.worker.work import Share, Shortfall, Work


class LoadWork(Work):
    """Loads ranges of blocks, which end in any order; the tokens before the first gap count.

    ranges: in the order of the prompt.
    first_token: of the prompt; those before it are there already.
    ready: the copies wait on it.
    """

    def __init__(
        self,
        mover: Mover,
        prompt: PromptBlocks,
        ranges: Sequence[BlockRange],
        first_token: int,
        ready: ReadyEvent | None,
    ) -> None:
        self._mover, self._prompt, self._ranges = mover, prompt, list(ranges)
        self._first_token, self._ready = first_token, ready
        self._num_taken = 0
        self._reached = [0] * len(self._ranges)  # tokens of the prompt, by range
        self._gaps: dict[int, Shortfall] = {}
        self._carried: list[int] = []  # ranges of which nothing is missing
        self._is_whole = False

    @property
    def progress(self) -> int:
        keys = self._prompt.keys
        if self._is_whole:
            return keys.num_tokens
        tokens = self._first_token
        for blocks, reached in zip(self._ranges, self._reached, strict=True):
            tokens = max(tokens, reached)
            if reached < keys.end_of(blocks.stop):
                break
        return tokens

    @property
    def num_ready(self) -> int:
        return len(self._ranges) - self._num_taken

    def take(self) -> Share:
        number = self._num_taken
        self._num_taken += 1
        return partial(self._load, number)

    def finish(self, child: ChildJob, shortfall: Shortfall | None) -> Shortfall | None:
        """Returns the shortfall of the first gap, which need not be the first in time."""
        self._is_whole = len(self._carried) == len(self._ranges)
        return self._gaps[min(self._gaps)] if self._gaps else shortfall

    def _load(self, number: int, child: ChildJob) -> Reason | None:
        self._ready = self._mover.to_follow(self._ready)
        values = self._prompt.values(self._ranges[number])
        loaded = partial(self._loaded, number)
        error: StoreError | None = None
        try:
            reason = self._mover.load(child, values, self._first_token, self._ready, loaded)
        except StoreError as raised:
            reason, error = reason_of(raised), raised
        if reason is None:
            self._carried.append(number)
        else:
            self._gaps[number] = Shortfall(reason, error)
        return reason

    def _loaded(self, number: int, values: Sequence[Value]) -> None:
        last = values[-1]
        tokens = last.number * self._prompt.layout.block_tokens + last.num_tokens
        self._reached[number] = tokens
