"""TierReader: reads each value from the fastest tier that has it; removes wrong ones by tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from pdstore.errors import BadValue, StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, Store, count_of, num_done_of
from pdstore.store.tiers.found import Whereabouts, is_for_all_tiers
from pdstore.store.tiers.lower import LowerTier

log = logging.getLogger(__name__)


class TierReader:
    """Reads values from several tiers, and notes where it has found each.

    A value of another length than is asked for is looked for below. If it is there, it is removed
    above. Any other error in a value shows only when the value is verified, which the caller does
    (`OpensTiers`).

    found, was_read: note where values are found, and from where they are read.
    which_leading: returns which keys a tier has, up to the first that no tier may have.
    begin_read: is called before values in a lower tier are read.
    """

    def __init__(
        self,
        first: Store,
        lower: Sequence[LowerTier],
        found: Whereabouts,
        was_read: Whereabouts,
        *,
        which_leading: Callable[[int, Sequence[BlockKey]], list[bool]],
        begin_read: Callable[[int, Sequence[BlockKey]], None],
    ) -> None:
        self._first = first
        self._lower = lower
        self._found = found
        self._was_read = was_read
        self._which_leading = which_leading
        self._begin_read = begin_read
        self._num_wrong = [0] * (len(lower) + 1)

    @property
    def num_wrong(self) -> Mapping[int, int]:
        """Numbers of wrong values that were removed from one tier alone, by the tier's number."""
        return {number: count for number, count in enumerate(self._num_wrong) if count}

    def read(
        self, number: int, keys: Sequence[BlockKey], slots: Slots
    ) -> tuple[int, StoreError | None]:
        """Reads leading values, each from the first tier that has it with the right length.

        It begins at the tier with this number. Returns how many values are read, and the error if
        the next value has another length wherever it is, or if the first tier failed.
        """
        done, is_again = 0, True
        while is_again:
            num_read, error, is_again = self._read_once(
                number, keys[done:], slots.part(done, len(keys))
            )
            done += num_read
        return done, error

    def read_in(
        self, number: int, keys: Sequence[BlockKey], slots: Slots
    ) -> tuple[int, StoreError | None]:
        """Reads leading values in the tier with this number; returns how many, and any error.

        A lower tier's error is one about the value behind them; if that tier fails, it has nothing.
        """
        if number:
            since = self._found.num_forgotten
            self._begin_read(number, keys)
            num_read, wrong = self._lower[number - 1].get(keys, slots)
            self._found.note(number, keys[:num_read], since)
            self._was_read.note(number, keys[:num_read])
            return num_read, wrong
        error: StoreError | None = None
        try:
            num_read = count_of(self._first.get(keys, slots), keys, self._first)
        except StoreError as caught:
            num_read, error = num_done_of(caught, keys), caught
        self._found.note(0, keys[:num_read])
        self._was_read.note(0, keys[:num_read])
        return num_read, error

    def remove_in(self, number: int, keys: Sequence[BlockKey]) -> None:
        """Removes wrong values from the tier with this number; the others may have right ones.

        Raises the first tier's error; a lower tier's is only logged.
        """
        self._num_wrong[number] += len(keys)
        if number == 0:
            self._first.remove(keys)
            return
        try:
            self._lower[number - 1].remove(keys)
        except StoreError as error:  # it is out; a load that reads the value there removes it then
            log.warning("not removed from a lower tier: %s", error)

    def _read_once(
        self, number: int, keys: Sequence[BlockKey], slots: Slots
    ) -> tuple[int, StoreError | None, bool]:
        """Does what `read` does, but ends at a value that this tier said it has, and does not have.

        Then the third item of the result is True: that value may lie below.
        """
        done, error = self.read_in(number, keys, slots)
        is_last = number == len(self._lower)
        if done == len(keys) or is_last or not _is_miss(error) or not is_for_all_tiers(keys[done]):
            return done, error, False
        rest, of_rest = keys[done:], slots.part(done, len(keys))
        has = self._which_leading(number, rest)
        has[0] = False
        below = [i for i, is_here in enumerate(has) if not is_here]
        num_below, wrong = self.read(number + 1, [rest[i] for i in below], of_rest.chosen(below))
        end = below[num_below] if num_below < len(below) else len(has)
        if end == 0:
            return done, wrong or error, False
        if error is not None:
            self._remove_wrong_length(number, keys[done])
        here = [i for i in range(end) if has[i]]
        if here:
            got, failed = self.read_in(number, [rest[i] for i in here], of_rest.chosen(here))
            if got < len(here):
                return done + here[got], failed, _is_miss(failed)
        return done + end, wrong, False

    def _remove_wrong_length(self, number: int, key: BlockKey) -> None:
        """Removes a value that has not the length which a lower tier's value and the caller say."""
        label = (self._first if number == 0 else self._lower[number - 1].store).label
        log.warning("%s: %s has a wrong length and is removed", label, key)
        try:
            self.remove_in(number, [key])
        except StoreError as error:
            log.warning("it could not be removed: %s", error)


def _is_miss(error: StoreError | None) -> bool:
    """True unless a read ended because its tier failed: then the value may lie in another tier."""
    return error is None or isinstance(error, BadValue)
