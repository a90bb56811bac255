"""read_values: reads values from the store and says how many are right; removes wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from pdstore.errors import BadValue, Reason, StoreError, reason_of
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.values import Values
from pdstore.store.base import Slots, Store, count_of, num_done_of
from pdstore.store.optional import OpensTiers
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
    """Reads values into host memory, verifies them, and removes wrong ones (`context.removed`).

    If the store has tiers, a wrong value is removed from the tiers where it is wrong. If one of
    them has it right, it is read from there, and the read goes on.
    """
    done = 0
    while True:
        rest = values[done:]
        of_rest = slots.part(done, len(values))
        num_read, missing = _get(context, turn, rest, of_rest)
        wrong = _wrong_among(context, rest, of_rest, num_read)
        if missing is not None and missing.error is None:
            wrong[num_read] = missing.reason
        left = _mend(context, turn, rest, of_rest, wrong)
        if left:
            first, reason = next(iter(left.items()))
            return Read(done + first, Shortfall(reason), done + num_read)
        done += num_read
        if missing is None or missing.error is not None:
            return Read(done, missing, done)
        done += 1  # a value that ended the read, and that a tier has right
        if done == len(values):
            return Read(done, None, done)


def _get(
    context: TransferContext, turn: Turn, values: Values, slots: Slots
) -> tuple[int, Shortfall | None]:
    """Reads values; if the store raises an error, the values before it still count as read."""
    keys = values.keys
    with turn.in_store_call():
        try:
            found = count_of(context.store.get(keys, slots), keys, context.store)
        except BadValue as error:
            return num_done_of(error, keys), Shortfall(reason_of(error))
        except StoreError as error:
            return num_done_of(error, keys), Shortfall(reason_of(error), error)
    return found, None if found == len(keys) else Shortfall(Reason.LOST)


def _wrong_among(
    context: TransferContext, values: Values, slots: Slots, num_read: int
) -> dict[int, Reason]:
    """Returns which of the leading values that were read are wrong, and why."""
    views = [slots.value(i) for i in range(num_read)]
    sums = context.copies.checksums(views)
    prefixes = values.header_prefixes
    return {
        i: block.verify(view, block.header_of(prefixes[i]), sums[i]) or Reason.CORRUPT
        for i, view in enumerate(views)
        if not block.is_right(view, prefixes[i], sums[i])
    }


def _mend(
    context: TransferContext,
    turn: Turn,
    values: Values,
    slots: Slots,
    wrong: Mapping[int, Reason],
) -> dict[int, Reason]:
    """Removes wrong values, and reads them from a tier that has them right; returns the others."""
    left = dict(wrong)
    is_there = [i for i, reason in wrong.items() if reason is not Reason.LOST]
    opens = context.store.optional(OpensTiers) if is_there else None
    if opens is None:
        _remove(context, turn, context.store, {values.keys[i]: wrong[i] for i in is_there})
        return left
    for store in opens.tier_stores():
        bad: dict[BlockKey, Reason] = {}
        for i in [i for i in is_there if i in left]:
            one = values.chosen([i])
            reason = _read_one(context, turn, store, one, slots.chosen([i]))
            if reason is None:
                del left[i]
            elif reason is not Reason.LOST:
                bad[one.keys[0]] = reason
        _remove(context, turn, store, bad)
    return left


def _read_one(
    context: TransferContext, turn: Turn, store: Store, one: Values, slots: Slots
) -> Reason | None:
    """Reads and verifies one value of one tier; returns why it is wrong, or LOST, or None."""
    with turn.in_store_call():
        try:
            if store.get(one.keys, slots) != 1:
                return Reason.LOST
        except BadValue as error:
            return reason_of(error)
        except StoreError:
            return Reason.LOST
    return _wrong_among(context, one, slots, 1).get(0)


def _remove(
    context: TransferContext, turn: Turn, store: Store, wrong: Mapping[BlockKey, Reason]
) -> None:
    """Removes those of the wrong values that `removed` asks for, so that a save heals them."""
    bad = [key for key, reason in wrong.items() if reason in context.removed]
    if not bad:
        return
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    why = wrong[bad[0]].value
    log.warning("%s: %s is %s and is removed%s", store.label, bad[0], why, more)
    with turn.in_store_call():
        try:
            store.remove(bad)
        except StoreError as error:
            log.warning("it could not be removed: %s", error)
