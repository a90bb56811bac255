"""Reuse: how large a pool must be for a hit rate, from a trace of requests.

A trace has a JSON object a line, with `hash_ids`: the ids of the request's 512-token blocks, each
of which names a whole prefix (the format of Mooncake's published traces).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

from pdstore.errors import ConfigError

BLOCK_TOKENS = 512


def read_trace(path: str) -> list[list[int]]:
    """Returns the block ids of each request. Raises ConfigError."""
    try:
        lines = Path(path).read_text().splitlines()
        return [_ids_of(json.loads(line)) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no trace: each line must be a JSON object with a list hash_ids"
        ) from error


def _ids_of(request: dict[str, object]) -> list[int]:
    ids = request["hash_ids"]
    if isinstance(ids, list) and all(type(each) is int for each in ids):
        return ids
    raise ValueError(f"hash_ids is no list of numbers: {str(ids)[:40]}")


class ReuseDistances:
    """Reuse distances: for each repeated block, the number of other blocks used since its last use.

    A pool that drops the least recently used block hits exactly those whose distance is less than
    its size: one pass over the trace answers for every size.
    """

    def __init__(self, requests: Iterable[list[int]]) -> None:
        blocks = [block for request in requests for block in request]
        self.num_blocks = len(blocks)
        counts = _Counts(len(blocks))
        last: dict[int, int] = {}
        distances = []
        for now, block in enumerate(blocks):
            before = last.get(block)
            if before is not None:
                distances.append(counts.after(before))
                counts.add(before, -1)
            counts.add(now, 1)
            last[block] = now
        self._sorted = sorted(distances)

    @property
    def best(self) -> float:
        """The hit rate of an unbounded pool."""
        return len(self._sorted) / max(1, self.num_blocks)

    def hit_rate(self, num_blocks: int) -> float:
        """Returns the hit rate of a pool with room for so many blocks."""
        return bisect_left(self._sorted, num_blocks) / max(1, self.num_blocks)

    def blocks_for(self, hit_rate: float) -> int | None:
        """Returns the smallest pool, in blocks, that reaches a hit rate; None if none does."""
        needed = -int(-hit_rate * self.num_blocks // 1)
        if needed > len(self._sorted):
            return None
        return self._sorted[needed - 1] + 1 if needed else 0


class _Counts:
    """Numbers by place, with sums over a range in logarithmic time (a Fenwick tree)."""

    def __init__(self, length: int) -> None:
        self._tree = [0] * (length + 1)
        self._total = 0

    def add(self, place: int, number: int) -> None:
        self._total += number
        place += 1
        while place < len(self._tree):
            self._tree[place] += number
            place += place & -place

    def after(self, place: int) -> int:
        """Returns the sum of the numbers behind a place."""
        total, place = self._total, place + 1
        while place:
            total -= self._tree[place]
            place -= place & -place
        return total
