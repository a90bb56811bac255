"""TierSpan: in which tier of a store the tokens of a prompt lie.

A store without tiers has no spans. Then nothing here costs time, and all tokens count as those of
tier 0, which is also the number of the first of several tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pdstore.format.keys import PromptKeys
from pdstore.store.base import Store
from pdstore.store.optional import TellsTiers


class TierSpan(NamedTuple):
    """Neighbouring tokens of a prompt that lie in the same tier.

    tier: the tier's number; 0 is the first.
    start, stop: the first of the tokens, and the first one after them.
    """

    tier: int
    start: int
    stop: int


def spans_of(store: Store, keys: PromptKeys) -> tuple[TierSpan, ...]:
    """Returns where this process has found the blocks of a prompt last; does no I/O.

    The whole prompt must have been found. A block that lies in several tiers, in parts, counts as
    one of the slowest of them.
    """
    tells = store.optional(TellsTiers)
    if tells is None or not keys.num_tokens:
        return ()
    parts = keys.namespace.parts
    numbers = tells.which_tier(keys.store_keys(parts))
    if not any(numbers):
        return (TierSpan(0, 0, keys.num_tokens),)
    step = len(parts)
    return spans_by_block(keys, (max(numbers[i : i + step]) for i in range(0, len(numbers), step)))


def spans_by_block(keys: PromptKeys, tiers: Iterable[int]) -> tuple[TierSpan, ...]:
    """Returns the spans of a prompt's leading blocks. tiers: the number of each block's tier."""
    spans = []
    first = 0
    for tier, blocks in groupby(tiers):
        stop = first + sum(1 for _ in blocks)
        spans.append(TierSpan(tier, keys.end_of(first), keys.end_of(stop)))
        first = stop
    return tuple(spans)


def tokens_by_tier(spans: Sequence[TierSpan], start: int, stop: int) -> Mapping[int, int]:
    """Returns how many of the tokens from `start` to `stop` - 1 lie in each tier.

    Tokens outside the spans count as those of tier 0.
    """
    if not spans:
        return {0: stop - start} if start < stop else {}
    counts: Counter[int] = Counter()
    for span in spans:
        counts[span.tier] += max(0, min(stop, span.stop) - max(start, span.start))
    counts[0] += max(0, stop - start) - sum(counts.values())
    return {tier: count for tier, count in sorted(counts.items()) if count}
