"""read_values: reads values from the store and says how many are right; removes wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from pdstore.errors import BadValue, Reason, StoreError, reason_of
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.values import Values
from pdstore.store.base import Slots, count_of, num_done_of
from pdstore.store.transfer import Shortfall, TransferContext, Turn

log = logging.getLogger(__name__)


class Read(NamedTuple):
    """The outcome of a read: how many leading values are right, and why not more.

    num_read: how many leading values the store brought, right or wrong.
    """

    num_right: int
    shortfall: Shortfall | None = None
    num_read: int = 0


def read_values(context: TransferContext, turn: Turn, values: Values, slots: Slots) -> Read:
    """Reads values into host memory, verifies them, and removes wrong ones (`context.removed`)."""
    read = _get(context, turn, values, slots)
    views = [slots.value(i) for i in range(read.num_right)]
    sums = context.copies.checksums(views)
    prefixes = values.header_prefixes
    wrong = {
        i: block.verify(view, block.header_of(prefixes[i]), sums[i]) or Reason.CORRUPT
        for i, view in enumerate(views)
        if not block.is_right(view, prefixes[i], sums[i])
    }
    missing = read.shortfall
    if missing is not None and missing.error is None and len(views) < len(values):
        wrong[len(views)] = missing.reason
    _remove(context, turn, {values.keys[i]: reason for i, reason in wrong.items()})
    if wrong:
        first, reason = next(iter(wrong.items()))
        read = Read(first, Shortfall(reason))
    return read._replace(num_read=len(views))


def _get(context: TransferContext, turn: Turn, values: Values, slots: Slots) -> Read:
    """Reads values; if the store raises an error, the values before it still count as read."""
    keys = values.keys
    with turn.in_store_call():
        try:
            found = count_of(context.store.get(keys, slots), keys, context.store)
        except BadValue as error:
            return Read(num_done_of(error, keys), Shortfall(reason_of(error)))
        except StoreError as error:
            return Read(num_done_of(error, keys), Shortfall(reason_of(error), error))
    return Read(found, None if found == len(keys) else Shortfall(Reason.LOST))


def _remove(context: TransferContext, turn: Turn, wrong: Mapping[BlockKey, Reason]) -> None:
    """Removes those of the wrong values that `removed` asks for, so that a save heals them."""
    bad = [key for key, reason in wrong.items() if reason in context.removed]
    if not bad:
        return
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    label = context.store.label
    why = wrong[bad[0]].value
    log.warning("%s: %s is %s and is removed%s", label, bad[0], why, more)
    with turn.in_store_call():
        try:
            context.store.remove(bad)
        except StoreError as error:
            log.warning("it could not be removed: %s", error)
