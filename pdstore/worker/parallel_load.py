"""ParallelLoad: one load that several workers carry at once, a blocks of blocks each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pdstore.outcome import Direction, JobResult, Reason
from pdstore.worker.job import Job
from pdstore.worker.mover import WINDOW_BYTES

RANGE_BYTES = WINDOW_BYTES
"""What a worker takes at a time. A load of at least twice as much runs on several."""


class BlockRange(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


def ranges_of(first: int, stop: int, num_bytes: int) -> list[BlockRange]:
    """The blocks first..stop, which have so many bytes, in even ranges; one where they are few."""
    count = max(1, min(num_bytes // RANGE_BYTES, stop - first))
    ends = [first + (stop - first) * i // count for i in range(count + 1)]
    return [BlockRange(*ends) for ends in pairwise(ends)]


def _nothing(job: Job) -> Reason | None:
    raise AssertionError("the children do the work")


def _too_late(blocks: BlockRange, child: Job) -> Reason | None:
    """Instead of `load` after the end: what that holds is released."""
    return Reason.CANCELLED


class ParallelLoad(Job):
    """A load that children, jobs of their own, do together: each takes the next blocks in turn.

    It ends when no blocks is being loaded and no more will be, with the tokens before the first
    gap. Behind a gap no blocks is begun. A child that found no worker in time is not waited for.

    ranges: in the order of the prompt.
    load: loads a blocks for a child, whose `progress` it moves; says why not all of it.
    seconds: for all of it.
    first_token, num_tokens: of the prompt: what is there before, and what will be.
    """

    def __init__(
        self,
        ranges: Sequence[BlockRange],
        load: Callable[[BlockRange, Job], Reason | None],
        num_children: int,
        *,
        num_bytes: int,
        seconds: float,
        first_token: int,
        num_tokens: int,
    ) -> None:
        super().__init__(
            Direction.LOAD, _nothing, num_bytes=num_bytes, seconds=seconds, progress=first_token
        )
        self._ranges, self._num_tokens = ranges, num_tokens
        self._load = load
        self._changing = threading.Lock()
        self._num_taken = 0
        self._busy: set[Job] = set()  # children with a blocks
        self._gaps: list[JobResult] = []
        self._is_over = False
        share = num_bytes // num_children
        self.children = tuple(self._child(share, seconds) for _ in range(num_children))
        self._num_left = num_children
        for child in self.children:
            child.on_end(self._child_ended)

    def cancel(self) -> None:
        for child in self.children:
            child.cancel()

    def _child(self, num_bytes: int, seconds: float) -> Job:
        child = Job(
            Direction.LOAD,
            self._run_child,
            num_bytes=num_bytes,
            seconds=seconds,
            progress=self.progress,
        )
        child.is_part = True
        return child

    def _run_child(self, child: Job) -> Reason | None:
        """A child's work: blocks after blocks."""
        while (blocks := self._take(child)) is not None:
            reason = self._load(blocks, child)
            if reason is not None:
                return reason
        return None

    def _take(self, child: Job) -> BlockRange | None:
        """The next blocks; the child is done with the one before."""
        with self._changing:
            self._busy.discard(child)
            if self._has_more() and not child.done:
                self._busy.add(child)
                self._num_taken += 1
                return self._ranges[self._num_taken - 1]
        self._end_if_over()
        return None

    def _child_ended(self, child: Job) -> None:
        result = child.result
        assert result is not None
        with self._changing:
            self._num_left -= 1
            is_last = self._num_left == 0 and self._has_more()  # nobody will load the rest
            if child in self._busy or is_last:
                self._busy.discard(child)
                self._gaps.append(result)
        self._end_if_over()

    def _has_more(self) -> bool:
        return self._num_taken < len(self._ranges) and not self._gaps

    def _end_if_over(self) -> None:
        with self._changing:
            if self._is_over or self._busy or self._has_more():
                return
            self._is_over, self._load = True, _too_late
        self.cancel()  # those that wait for a worker, or are about to end
        gap = min(self._gaps, key=lambda gap: gap.num_tokens, default=JobResult(self._num_tokens))
        self.progress = gap.num_tokens
        self.end(gap.reason, gap.error)
