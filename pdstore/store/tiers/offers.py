"""optional_of: what several tiers together offer beyond the contract, by optional protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.geometry import Geometry
from pdstore.format.keys import BlockKey, Kind, Part, kind_of
from pdstore.store.admission import Admission
from pdstore.store.base import Slots, Store, num_done_of
from pdstore.store.optional import (
    ALL_KEYS,
    DoubtsServer,
    EvictsByUse,
    FindsAgain,
    FindsKeys,
    HasTiers,
    ListsValues,
    MeetsInTier,
    OpensTiers,
    Promotes,
    Room,
    ServerDoubt,
    StoredValue,
    TakesAdmission,
    TellsChanges,
    TellsOrigins,
    TellsReads,
    TellsRoom,
    TellsTiers,
)
from pdstore.store.tiers.again import Again
from pdstore.store.tiers.found import Whereabouts
from pdstore.store.transfer import Moved, MovesValues, Transfer, TransferContext
from pdstore.store.wrappers import WrapperStore

A = TypeVar("A")
P = TypeVar("P")


@dataclass(frozen=True)
class Stack:
    """The parts of a TieredStore that its optional calls use.

    tiers: the stores, the fastest first.
    found: where values were found.
    read: from where values were read.
    which_in: returns which keys the tier of a number has.
    read_in, remove_in: read values in the tier of a number, and remove wrong ones there.
    oldest_in: what `EvictsByUse.oldest_age_s` says of the tier of a number.
    use_admission, promote: as in `TakesAdmission` and `Promotes`.
    match_in: matches leading keys in the tier of a number.
    copy_down: queues copies of what the first tier has stored, of values of the given lengths.
    problems: returns for each lower tier why it is out, or None.
    """

    tiers: Sequence[Store]
    found: Whereabouts
    read: Whereabouts
    which_in: Callable[[int, Sequence[BlockKey]], Sequence[bool]]
    read_in: Callable[[int, Sequence[BlockKey], Slots], tuple[int, StoreError | None]]
    remove_in: Callable[[int, Sequence[BlockKey]], None]
    oldest_in: Callable[[int, Sequence[int]], float | None]
    use_admission: Callable[[Admission], None]
    promote: Callable[..., None]
    match_in: Callable[[int, Sequence[BlockKey]], int]
    copy_down: Callable[[Sequence[BlockKey], Sequence[int]], None]
    problems: Callable[[], Sequence[str | None]]

    def meeting_store(self) -> Store:
        """Returns the first tier's store, as `MeetsInTier` does."""
        return self.tiers[0]

    def tier_stores(self) -> Sequence[Store]:
        """Returns a store for each tier, as `OpensTiers` does."""
        return [_Tier(self, number) for number in range(len(self.tiers))]


class _Tier(WrapperStore):
    """One tier of several, of which a lower one that fails has nothing."""

    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__(stack.tiers[number])
        self._stack = stack
        self._number = number

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        num_read, error = self._stack.read_in(self._number, keys, slots)
        if error is not None:
            error.num_done = num_read
            raise error
        return num_read

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._stack.remove_in(self._number, keys)


def is_for_all_tiers(key: BlockKey) -> bool:
    """True for a block; tails, markers, beats and the pool's id are in the first tier alone."""
    return kind_of(key) is Kind.BLOCK


def optional_of(stack: Stack, protocol: type) -> object | None:
    """Returns an object with a protocol's calls for all tiers; None if the tiers lack them."""
    if protocol in (HasTiers, MeetsInTier, OpensTiers, TakesAdmission, Promotes):
        return stack
    if protocol is TellsTiers:
        return stack.found
    if protocol is TellsChanges:  # what callers wait for is in the first tier
        return stack.tiers[0].optional(protocol)
    make = _MAKERS.get(protocol)
    return make(stack) if make is not None else None


class _Reads:
    """TellsReads: what the tiers below the first were read for, and no copy of values."""

    def __init__(self, stack: Stack) -> None:
        self.which_read = stack.read.which_tier


def _again(stack: Stack) -> FindsAgain:
    return Again(stack.tiers, stack.found, stack.which_in, stack.match_in)


def _in_each(stack: Stack, protocol: type[P]) -> list[P] | None:
    """Returns what each tier offers for a protocol; None if one of them lacks it."""
    found = [each for store in stack.tiers if (each := store.optional(protocol)) is not None]
    return found if len(found) == len(stack.tiers) else None


class _Finder:
    """FindsKeys: asks each tier for what those above lack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = list(self._stack.which_in(0, keys))
        for number in range(1, len(self._stack.tiers)):
            rest = [i for i in range(len(keys)) if not found[i] and is_for_all_tiers(keys[i])]
            if not rest:
                break
            answers = self._stack.which_in(number, [keys[i] for i in rest])
            for i, is_there in zip(rest, answers, strict=True):
                found[i] = is_there
        return found


def _finder(stack: Stack) -> FindsKeys | None:
    return _Finder(stack) if _in_each(stack, FindsKeys) is not None else None


class _Lister:
    """ListsValues: lists each key once, as the fastest tier that has it does."""

    def __init__(self, tiers: Sequence[ListsValues]) -> None:
        self._tiers = tiers

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        seen: set[BlockKey] = set()
        for tier in self._tiers:
            for value in tier.stored_values(prefix):
                if value.key not in seen:
                    seen.add(value.key)
                    yield value

    def length_of(self, key: BlockKey) -> int | None:
        lengths = (tier.length_of(key) for tier in self._tiers)
        return next((length for length in lengths if length is not None), None)


def _lister(stack: Stack) -> ListsValues | None:
    tiers = _in_each(stack, ListsValues)
    return _Lister(tiers) if tiers is not None else None


class _Room:
    """TellsRoom: the room of the first tier, and as its problem also that of a lower tier."""

    def __init__(self, stack: Stack, inner: TellsRoom) -> None:
        self._stack = stack
        self._inner = inner

    def room(self) -> Room:
        room = self._inner.room()
        problems = [room.problem, *self._stack.problems()]
        return room._replace(problem=next(filter(None, problems), None))


def _room(stack: Stack) -> TellsRoom | None:
    inner = stack.tiers[0].optional(TellsRoom)
    return _Room(stack, inner) if inner is not None else None


class _ByUse:
    """EvictsByUse: tells the age of the last tier, as what others evict is below; else the first's.

    A first tier that lacks these calls makes no room and counts no use here.
    """

    def __init__(self, stack: Stack, first: EvictsByUse | None) -> None:
        self._stack = stack
        self._first = first

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        return self._stack.oldest_in(len(self._stack.tiers) - 1, sizes)

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        return self._first is not None and self._first.make_room(keys, sizes)

    def use(self, keys: Sequence[BlockKey]) -> None:
        if self._first is not None:
            self._first.use(keys)


def _by_use(stack: Stack) -> EvictsByUse | None:
    first = stack.tiers[0].optional(EvictsByUse)
    last = stack.tiers[-1].optional(EvictsByUse)
    return _ByUse(stack, first) if first is not None or last is not None else None


class _Doubts:
    """DoubtsServer: the doubts of every tier that has some, each named by its tier's label."""

    def __init__(self, stack: Stack) -> None:
        self._stores = stack.tiers

    def server_doubts(self) -> Iterator[ServerDoubt]:
        for store in self._stores:
            asks = store.optional(DoubtsServer)
            for doubt in asks.server_doubts() if asks is not None else ():
                yield doubt._replace(said=f"{store.label}: {doubt.said}")


class _Origins:
    """TellsOrigins: the origins of every tier that tells them."""

    def __init__(self, tiers: Sequence[TellsOrigins]) -> None:
        self._tiers = tiers

    @property
    def origins(self) -> str:
        return "; ".join(tier.origins for tier in self._tiers)


def _origins(stack: Stack) -> TellsOrigins | None:
    tiers = [each for store in stack.tiers if (each := store.optional(TellsOrigins)) is not None]
    return _Origins(tiers) if tiers else None


class _Mover:
    """MovesValues: the first tier's way, whose saves are copied down as those of `put` are."""

    def __init__(self, stack: Stack, inner: MovesValues) -> None:
        self._stack = stack
        self._inner = inner

    def transfer(self, context: TransferContext) -> Transfer | None:
        hook = _CallsSeen(self._stack, context.geometry)
        return self._inner.transfer(replace(context.through(hook), may_lie_elsewhere=True))


class _CallsSeen:
    """A CallHook for the saves and loads of a transfer, which `TieredStore` does not see."""

    def __init__(self, stack: Stack, geometry: Geometry) -> None:
        self._stack = stack
        self._sizes = {
            part: block.HEADER_BYTES + of.payload_bytes(geometry.block_tokens)
            for part, of in geometry.parts.items()
        }

    def __call__(
        self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]
    ) -> Moved[A]:
        try:
            moved = call()
        except StoreError as error:
            self._copy_down(verb, keys[: num_done_of(error, keys)])
            raise
        if moved.error is None:  # after this error the save is made again
            self._copy_down(verb, keys)
        if verb == "get" and moved.num_values:
            self._stack.read.note(0, keys)
        return moved

    def _copy_down(self, verb: str, keys: Sequence[BlockKey]) -> None:
        if verb == "put":
            blocks = [key for key in keys if is_for_all_tiers(key)]
            self._stack.copy_down(blocks, list(map(self._size_of, blocks)))

    def _size_of(self, key: BlockKey) -> int:
        """Returns the length of a block's value, by the part that its key names."""
        group, shard = key.split(":")[2:4]
        return self._sizes[Part(int(group.partition(".")[0]), int(shard))]


def _mover(stack: Stack) -> MovesValues | None:
    inner = stack.tiers[0].optional(MovesValues)
    return _Mover(stack, inner) if inner is not None else None


_MAKERS: Mapping[type, Callable[[Stack], object | None]] = {
    FindsKeys: _finder,
    ListsValues: _lister,
    TellsRoom: _room,
    EvictsByUse: _by_use,
    FindsAgain: _again,
    TellsReads: _Reads,
    DoubtsServer: _Doubts,
    TellsOrigins: _origins,
    MovesValues: _mover,
}
