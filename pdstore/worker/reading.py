"""read_values: reads values from the store and says how many are right; removes wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdstore.errors import BadValue, Reason, StoreError, reason_of
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.store.base import Slots, Store, count_of, num_done_of
from pdstore.worker.job import ChildJob, Shortfall
from pdstore.worker.swap.base import Swap
from pdstore.worker.values import Values

log = logging.getLogger(__name__)

BAD = frozenset({Reason.CORRUPT, Reason.FOREIGN, Reason.FORGED})
"""Reasons why no instance can use a value, so that any instance that reads it removes it."""


class Ends(NamedTuple):
    """The two ends between which values are moved, paged cache and store, and the metrics.

    removed: reasons; a value that is wrong for one of them is removed from the store.
    """

    layout: Layout
    swap: Swap
    store: Store
    metrics: Metrics
    removed: frozenset[Reason] = BAD

    def count_tokens(self, verb: str, num_counted: Sequence[int]) -> None:
        """Counts the tokens of some values, each block once (`Values.num_counted`)."""
        self.metrics.tokens.labels(verb).inc(sum(num_counted))


class Read(NamedTuple):
    """The outcome of a read: how many leading values are right, and why not more.

    num_read: how many leading values the store brought, right or wrong.
    """

    num_right: int
    shortfall: Shortfall | None = None
    num_read: int = 0


def read_values(ends: Ends, child: ChildJob, values: Values, slots: Slots) -> Read:
    """Reads values into host memory, verifies them, and removes wrong ones (`Ends.removed`)."""
    read = _get(ends, child, values, slots)
    views = [slots.value(i) for i in range(read.num_right)]
    sums = ends.swap.checksums(views)
    wrong = {
        i: block.verify(view, block.header_of(values.starts[i]), sums[i]) or Reason.CORRUPT
        for i, view in enumerate(views)
        if not block.is_right(view, values.starts[i], sums[i])
    }
    missing = read.shortfall
    if missing is not None and missing.error is None and len(views) < len(values):
        wrong[len(views)] = missing.reason
    _remove(ends, child, {values.keys[i]: reason for i, reason in wrong.items()})
    if wrong:
        first, reason = next(iter(wrong.items()))
        read = Read(first, Shortfall(reason))
    return read._replace(num_read=len(views))


def _get(ends: Ends, child: ChildJob, values: Values, slots: Slots) -> Read:
    """Reads values; if the store raises an error, the values before it still count as read."""
    keys = values.keys
    with child.in_store_call():
        try:
            found = count_of(ends.store.get(keys, slots), keys, ends.store)
        except BadValue as error:
            return Read(num_done_of(error, keys), Shortfall(reason_of(error)))
        except StoreError as error:
            return Read(num_done_of(error, keys), Shortfall(reason_of(error), error))
    return Read(found, None if found == len(keys) else Shortfall(Reason.LOST))


def _remove(ends: Ends, child: ChildJob, wrong: Mapping[BlockKey, Reason]) -> None:
    """Removes those of the wrong values that `ends.removed` asks for, so that a save heals them."""
    bad = [key for key, reason in wrong.items() if reason in ends.removed]
    if not bad:
        return
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    label, why = ends.store.label, wrong[bad[0]].value
    log.warning("%s: %s is %s and is removed%s", label, bad[0], why, more)
    with child.in_store_call():
        try:
            ends.store.remove(bad)
        except StoreError as error:
            log.warning("it could not be removed: %s", error)
