"""optional_of: what several tiers together offer beyond the contract, by optional protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.geometry import Geometry
from pdstore.format.keys import BlockKey, Part
from pdstore.metrics import CallMetrics, Metrics, TierState
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
    ShowsTiers,
    StoredValue,
    TakesAdmission,
    TellsChanges,
    TellsOrigins,
    TellsReads,
    TellsRemovals,
    TellsRoom,
    TellsTiers,
    tier_name,
)
from pdstore.store.tiers.again import Again
from pdstore.store.tiers.found import Whereabouts, is_for_all_tiers
from pdstore.store.tiers.lower import LowerTier
from pdstore.store.tiers.promotion import Promotion, Put
from pdstore.store.tiers.reader import TierReader
from pdstore.store.tiers.search import TierSearch
from pdstore.store.transfer import Moved, MovesValues, Transfer, TransferContext
from pdstore.store.wrappers import WrapperStore

A = TypeVar("A")
P = TypeVar("P")


_MOST_READ = 1 << 15  # keys, of running loads: each asks after a copy where its values were read


@dataclass(frozen=True)
class Stack:
    """The parts of a TieredStore that its optional calls use.

    first, lower: the first tier's store, and the lower tiers.
    found, was_read: where values were found, and from where they were read.
    search: finds and leases keys in one tier.
    before_put: is called with the keys before values are put into the first tier.
    copy_down: queues copies of what the first tier has stored, of values of the given lengths.
    """

    first: Store
    lower: Sequence[LowerTier]
    found: Whereabouts
    was_read: Whereabouts
    search: TierSearch
    reader: TierReader
    promotion: Promotion
    before_put: Callable[[Sequence[BlockKey]], None]
    copy_down: Callable[[Sequence[BlockKey], Sequence[int]], None]

    @classmethod
    def over(
        cls,
        first: Store,
        lower: Sequence[LowerTier],
        before_put: Callable[[Sequence[BlockKey]], None],
        copy_down: Callable[[Sequence[BlockKey], Sequence[int]], None],
    ) -> Stack:
        """Returns the parts for some tiers."""
        found, was_read = Whereabouts(), Whereabouts(_MOST_READ)
        search = TierSearch(first, lower, found)
        promotion = Promotion(first, lower, found)
        reader = TierReader(
            first,
            lower,
            found,
            was_read,
            which_leading=search.which_leading,
            begin_read=promotion.begin_read,
        )
        return cls(first, lower, found, was_read, search, reader, promotion, before_put, copy_down)

    @property
    def tiers(self) -> Sequence[Store]:
        """The stores of all tiers, as in `HasTiers`."""
        return [self.first, *(tier.store for tier in self.lower)]

    def use_admission(self, admission: Admission) -> Admission:
        """Lets an admission decide what is copied, as `TakesAdmission` does."""
        of_all = self.promotion.admission or admission
        self.promotion.admission = of_all
        for tier in self.lower:
            tier.copier.admission = of_all
        return of_all

    def promote(self, keys: Sequence[BlockKey], slots: Slots, put: Put | None = None) -> None:
        """Puts values that were found below into the first tier, as `Promotes` does."""
        self.promotion.promote(keys, slots, put)

    def tier_names(self) -> Sequence[str]:
        """Returns the name of each tier, as `ShowsTiers` does."""
        return [tier_name(number, store) for number, store in enumerate(self.tiers)]

    def tier_states(self) -> Sequence[TierState]:
        """Returns the present state of each tier, as `ShowsTiers` does."""
        first, *names = self.tier_names()
        states = [TierState(first, self.first.label, copies=self._copies_in(0))]
        for number, (name, tier) in enumerate(zip(names, self.lower, strict=True), start=1):
            states.append(tier.state(name, self._copies_in(number)))
        return states

    def tier_rooms(self) -> Mapping[str, TellsRoom]:
        """Returns what tells the room of each tier that tells it, as `ShowsTiers` does."""
        rooms = zip(
            self.tier_names(), (store.optional(TellsRoom) for store in self.tiers), strict=True
        )
        return {name: room for name, room in rooms if room is not None}

    def count_calls(self, metrics: Metrics) -> None:
        """Counts all later calls of lower tiers in these metrics, as `ShowsTiers` does."""
        for name, tier in zip(self.tier_names()[1:], self.lower, strict=True):
            tier.store.count_in(CallMetrics(metrics, name))

    def _copies_in(self, number: int) -> Mapping[str, int]:
        """Returns what became of copies to and from the tier with this number, by their outcome."""
        counts = {"wrong": self.reader.num_wrong.get(number, 0)}
        if number == 0:
            return counts
        promoted = self.promotion.counts[number]
        return {**self.lower[number - 1].copier.counts, "promoted": promoted, **counts}

    def meeting_store(self) -> Store:
        """Returns the first tier's store, as `MeetsInTier` does."""
        return self.first

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
        num_read, error = self._stack.reader.read_in(self._number, keys, slots)
        if error is not None:
            error.num_done = num_read
            raise error
        return num_read

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._stack.reader.remove_in(self._number, keys)


def optional_of(stack: Stack, protocol: type) -> object | None:
    """Returns an object with a protocol's calls for all tiers; None if the tiers lack them."""
    if protocol in (HasTiers, MeetsInTier, OpensTiers, TakesAdmission, Promotes, ShowsTiers):
        return stack
    if protocol is TellsTiers:
        return stack.found
    if protocol is TellsChanges:  # what callers wait for is in the first tier
        return stack.first.optional(protocol)
    make = _MAKERS.get(protocol)
    return make(stack) if make is not None else None


class _Reads:
    """TellsReads: what the tiers below the first were read for, and no copy of values."""

    def __init__(self, stack: Stack) -> None:
        self.which_read = stack.was_read.which_tier


def _again(stack: Stack) -> FindsAgain:
    return Again(stack.tiers, stack.found, stack.search)


def _in_each(stack: Stack, protocol: type[P]) -> list[P] | None:
    """Returns what each tier offers for a protocol; None if one of them lacks it."""
    found = [each for store in stack.tiers if (each := store.optional(protocol)) is not None]
    return found if len(found) == len(stack.tiers) else None


class _Finder:
    """FindsKeys: asks each tier for what those above lack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = list(self._stack.search.which_in(0, keys))
        for number in range(1, len(self._stack.tiers)):
            rest = [i for i in range(len(keys)) if not found[i] and is_for_all_tiers(keys[i])]
            if not rest:
                break
            answers = self._stack.search.which_in(number, [keys[i] for i in rest])
            for i, is_there in zip(rest, answers, strict=True):
                found[i] = is_there
        return found


def _finder(stack: Stack) -> FindsKeys | None:
    return _Finder(stack) if _in_each(stack, FindsKeys) is not None else None


class _Removals:
    """TellsRemovals: a value is gone if no tier has it; one that does not answer may have it.

    Then it raises StoreError: a tier that is back would have what is told to be gone.
    """

    def __init__(self, lower: Sequence[LowerTier], tells: Sequence[TellsRemovals]) -> None:
        self._lower = lower
        self._tells = tells

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        first, *others = self._tells
        gone = list(first.which_removed(keys))
        for tier, tells in zip(self._lower, others, strict=True):
            rest = [i for i in range(len(keys)) if gone[i] and is_for_all_tiers(keys[i])]
            if not rest:
                break
            ask = partial(tells.which_removed, [keys[i] for i in rest])
            for i, is_gone in zip(rest, tier.ask(ask), strict=True):
                gone[i] = is_gone
        return gone


def _removals(stack: Stack) -> TellsRemovals | None:
    tells = _in_each(stack, TellsRemovals)
    return _Removals(stack.lower, tells) if tells is not None else None


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
        problems = [room.problem, *(tier.problem for tier in self._stack.lower)]
        return room._replace(problem=next(filter(None, problems), None))


def _room(stack: Stack) -> TellsRoom | None:
    inner = stack.first.optional(TellsRoom)
    return _Room(stack, inner) if inner is not None else None


class _ByUse:
    """EvictsByUse: tells the age of the last tier, as what others evict is below.

    While copies wait for longer than values stay in the first tier, what is saved now is evicted
    there before its copy. Then the first tier's age is told, as if there were no other.

    A first tier that lacks these calls makes no room and counts no use. In the lower tiers a use
    counts a little later.
    """

    def __init__(self, stack: Stack, first: EvictsByUse | None) -> None:
        self._stack = stack
        self._first = first

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        first_s = self._first.oldest_age_s(sizes) if self._first is not None else None
        if first_s is not None and self._stack.lower[-1].copier.delay_s > first_s:
            return first_s
        return self._stack.lower[-1].oldest_age_s(sizes)

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        return self._first is not None and self._first.make_room(keys, sizes)

    def use(self, keys: Sequence[BlockKey]) -> None:
        if self._first is not None:
            self._first.use(keys)
        blocks = [key for key in keys if is_for_all_tiers(key)]
        for tier in self._stack.lower:
            tier.copier.use(blocks)


def _by_use(stack: Stack) -> EvictsByUse | None:
    first = stack.first.optional(EvictsByUse)
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
        if verb == "put":
            self._stack.before_put(keys)
        try:
            moved = call()
        except StoreError as error:
            self._copy_down(verb, keys[: num_done_of(error, keys)])
            raise
        if moved.error is None:  # after this error the save is made again
            self._copy_down(verb, keys)
        if verb == "get" and moved.num_values:
            self._stack.was_read.note(0, keys)
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
    inner = stack.first.optional(MovesValues)
    return _Mover(stack, inner) if inner is not None else None


_MAKERS: Mapping[type, Callable[[Stack], object | None]] = {
    FindsKeys: _finder,
    TellsRemovals: _removals,
    ListsValues: _lister,
    TellsRoom: _room,
    EvictsByUse: _by_use,
    FindsAgain: _again,
    TellsReads: _Reads,
    DoubtsServer: _Doubts,
    TellsOrigins: _origins,
    MovesValues: _mover,
}
