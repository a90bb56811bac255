"""ArenaReservation and ArenaLoan: places of an arena, with what the library needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdstore.format.keys import BlockKey, Kind
from pdstore.native.arena import SlotArrays
from pdstore.store.base import check_call
from pdstore.store.in_place import Loan, Places, Reservation

_KINDS = {Kind.BLOCK: 0, Kind.TAIL: 1, Kind.HANDOFF: 1, Kind.POOL: 2}


@dataclass(frozen=True)
class ArenaReservation(Reservation):
    arrays: SlotArrays


@dataclass(frozen=True)
class ArenaLoan(Loan):
    arrays: SlotArrays


def reservation_of(
    memory: memoryview,
    arrays: SlotArrays,
    covered: int,
    sizes: Sequence[int],
) -> ArenaReservation:
    """Returns the reservation of the first `covered` values, which have a slot or are stored."""
    missing = [i for i, slot in enumerate(arrays.slots[:covered]) if slot >= 0]
    chosen = arrays if len(missing) == arrays.count else arrays.of(missing)
    places = Places(memory, chosen.offsets[:], [sizes[i] for i in missing])
    return ArenaReservation(covered, missing, places, chosen)


def numbers_of(kinds: Iterable[Kind]) -> bytes:
    """Returns kinds as the library takes them."""
    return bytes(map(_KINDS.__getitem__, kinds))


def check_sizes(keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
    """Raises ValueError for keys or sizes that no call may have."""
    check_call(keys)
    if len(sizes) != len(keys) or min(sizes, default=1) < 1:
        raise ValueError(f"{len(keys)} keys and {len(sizes)} sizes, or a size below 1")


def reserved_here(reservation: Reservation, count: int) -> SlotArrays:
    """Returns the slots of a reservation; ValueError if it is not an arena's or has fewer."""
    if not isinstance(reservation, ArenaReservation) or not 0 <= count <= len(reservation):
        raise ValueError("no reservation of an arena, or a count that it has not")
    return reservation.arrays


def lent_here(loan: Loan) -> SlotArrays:
    """Returns the slots of a loan. Raises ValueError if it is not an arena's."""
    if not isinstance(loan, ArenaLoan):
        raise ValueError("no loan of an arena")
    return loan.arrays
