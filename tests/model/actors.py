"""P and D of the model: pdstore's own jobs, movers, waits and followers, without their threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from pdstore.errors import (
    Cause,
    Direction,
    JobResult,
    Reason,
    StoreError,
    reason_of,
    reasons_with,
)
from pdstore.format.block import HEADER_BYTES, START_BYTES, Header
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import BlockKey, Kind, PromptKeys, kind_of
from pdstore.format.layout import Layout
from pdstore.format.plan import SavePlan
from pdstore.metrics import Metrics
from pdstore.scheduler.handoff_watch import HandoffWait, Verdict
from pdstore.scheduler.lookup import Lookup, Match, find
from pdstore.store.base import Store
from pdstore.store.transfer import Split, TransferContext
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.follow import Follow
from pdstore.worker.heartbeat import put_beat
from pdstore.worker.job import Job, NoShare, Share
from pdstore.worker.load import LoadWork
from pdstore.worker.mover import Mover
from pdstore.worker.save import MarkWork, SaveWork
from pdstore.worker.swap.base import TorchSwap
from pdstore.worker.transfer.copies import SwapCopies
from pdstore.worker.transfer.staged import StagedTransfer
from pdstore.worker.transfer.staging import Staging
from pdstore.worker.values import PromptBlocks
from tests.model.replay import Body, Meanwhile, ReplayStore
from tests.model.watch import BLOCK_TIMEOUT_S, Rules, Watch
from tests.support.clock import Clock
from tests.support.jobs import carry
from tests.support.kv import POISON, settings_of

INSTANCE = "2" * 32
BLOCK_IDS = [2, 0, 1]
SHARED = {"_waiting", "_released", "_is_closed", "_cut", "_gaps", "poll"}
"""State that a load's worker and its follower share, under the lock of the load's work."""


class Taken(NamedTuple):
    """The end of D's load, and whether the tokens that it counts are P's, byte for byte."""

    result: JobResult
    is_right: bool


@dataclass(frozen=True)
class Shape:
    """The size of a model.

    num_tokens: of the prompt; a block has two.
    follows: D loads while P saves.
    relayed: D has P's answer; else it waits for the marker that P has started.
    has_pages: a layer has a page of each block, which its tail carries whole.
    num_states: groups of layers whose state after the prompt P saves beside the tokens.
    has_draft: a layer is a draft model's, which P saves and D loads where it can.
    num_beats: the most that P puts while it saves; without any D does not know who P is.
    num_steps: of D's worker behind a `get`, each a taking of the lock, before which its follower
      may act. Then what is put is seen at once, and time stands still: those are tried without it.
    """

    num_tokens: int = 2
    num_ranks: int = 1
    num_ranges: int = 1
    follows: bool = False
    relayed: bool = True
    has_pages: bool = False
    num_states: int = 0
    has_draft: bool = False
    num_beats: int = 0
    num_steps: int = 0


class Rank:
    """One worker with its paged cache."""

    def __init__(self, layout: Layout, caches: Sequence[torch.Tensor]) -> None:
        self.layout, self.caches = layout, list(caches)
        self.swap = TorchSwap(layout, self.caches)
        self.staging = Staging(
            lambda size: memoryview(bytearray(size)), layout.geometry.largest_payload_bytes, 1 << 16
        )


class BlindStore(WrapperStore):
    """Says of all blocks that they are stored, so that a chain check finds what it hopes for."""

    def match(self, keys: Sequence[BlockKey]) -> int:
        is_marker = any(kind_of(key) is Kind.HANDOFF for key in keys)
        return super().match(keys) if is_marker else len(keys)


class TrustingSwap(TorchSwap):
    """Finds every value's checksum to be what is stored, and so every value right."""

    def checksums(self, values: Sequence[memoryview]) -> list[int]:
        return [int.from_bytes(value[START_BYTES:HEADER_BYTES], "little") for value in values]


class SteppedLock:
    """A lock before each taking of which something else happens, while there is something."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.meanwhile: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._step()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def reopen(self) -> None:
        """Gives the lock up for a moment."""
        self._lock.release()
        try:
            self._step()
        finally:
            self._lock.acquire()

    def _step(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()  # takes the lock itself
            self.meanwhile = meanwhile

    @property
    def is_held(self) -> bool:
        return self._lock.locked()


class SteppedLoad(LoadWork):
    """A load that does something else before each time that its worker takes the lock.

    What its worker and its follower share is not touched without it: so these are all the moments
    at which one can find what the other has done.
    """

    lock: SteppedLock  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = SteppedLock()

    def __getattribute__(self, name: str) -> Any:
        lock = object.__getattribute__(self, "__dict__").get("lock")
        assert not (name in SHARED and isinstance(lock, SteppedLock) and not lock.is_held), name
        return object.__getattribute__(self, name)


class TornLoad(SteppedLoad):
    """Finds its end by two looks, between which its follower may act."""

    def poll(self, *, takes: bool = False) -> Share | NoShare:
        if self._waiting:
            return super().poll(takes=takes)
        self.lock.reopen()
        return NoShare.DONE if self._is_closed else NoShare.NOT_YET


class Steps:
    """The steps of D's worker behind a `get`, before one of which its follower acts, once."""

    def __init__(self, store: ReplayStore, follow: Follow, clock: Clock) -> None:
        self._store, self._follow, self._clock = store, follow, clock
        self._left: Meanwhile | None = None
        self._is_used = False

    def __call__(self) -> None:
        if self._store.asked == "get" and not self._is_used:
            self._left = self._store.pause(self._follow.wanted())
        if self._left is None:
            return
        step, looked = self._left
        self._left = Meanwhile(step - 1, looked) if step else None
        if step == 0:
            self._is_used = True
            with contextlib.suppress(StoreError):
                self._follow.on_search(set(looked.found), self._clock.now)


class Actors:
    """The bodies of P's ranks and of D."""

    def __init__(self, shape: Shape, rules: Rules) -> None:
        self.shape, self.rules = shape, rules
        self._metrics = Metrics()
        settings = settings_of(
            block_tokens=2, kv_shards=shape.num_ranks, layer_ranges=shape.num_ranges
        )
        sizes = range(2, 2 + shape.num_states)
        states = [
            LayerSpec.state(size, "bytes", table=number, is_whole=True)
            for number, size in enumerate(sizes, 1 + shape.has_pages)
        ]
        pages = [LayerSpec.page(5, 2, "bytes", table=1)] * shape.has_pages
        layers = [LayerSpec(2, 1)] * 2 + pages + states
        layers += [LayerSpec(2, 1, optional=True)] * shape.has_draft
        entries = [1, *[2] * shape.has_pages, *[None] * shape.num_states]
        shaping = {"rope": "", "draft": "one" if shape.has_draft else ""}
        one = Layout.of(
            settings, dtype="float32", layers=layers, engine_block_tokens=entries, **shaping
        )
        self.namespace = one.namespace(settings, weights="w")
        self._handoff = HandoffId("1" * 32, INSTANCE if shape.num_beats else None)
        self.keys = PromptKeys(self.namespace).extend(range(shape.num_tokens))
        self._right = torch.arange(2.0 * 3 * 2 * 2).view(2, 3, 1, 2, 2)
        self._pages = [torch.arange(3 * 5, dtype=torch.int8).view(3, 5)] * shape.has_pages
        self._states = [torch.arange(3 * n, dtype=torch.int8).view(3, n) for n in sizes]
        self._drafts = [self._right[0].flip(0)] * shape.has_draft
        self._prefills = [self._rank_of(one, n) for n in range(shape.num_ranks)]
        right = [*self._right, *self._pages, *self._states, *self._drafts]
        self._decode_rank = Rank(one, [torch.full_like(each, POISON) for each in right])
        self.done = [
            self._handoff.done(self.namespace, n) for n in range(self.namespace.num_shards)
        ]
        self.failed = self._handoff.failed(self.namespace)
        self._started = self._handoff.started(self.namespace)

    def bodies(self) -> dict[str, Body]:
        """Returns the actors by name: P0, P1, P's heartbeat, D."""
        ranks = {f"P{n}": partial(self._prefill, n) for n in range(self.shape.num_ranks)}
        return {**ranks, "beats": self._beat, "D": self._decode}

    def blocks_of(self, rank: int) -> set[BlockKey]:
        """Returns the keys of the blocks that a rank of P has to store: no drafts."""
        owned = self._prefills[rank].layout.owned_parts
        parts = [part for part in owned if part in self.namespace.parts]
        states = [part for part in parts if part.group in self.namespace.states]
        tokens = [part for part in parts if part not in states]
        last = len(self.keys) - 1
        return {*self.keys.store_keys(tokens), *self.keys.store_keys(states, last)}

    def _rank_of(self, layout: Layout, number: int) -> Rank:
        size = self.shape.num_ranks
        heads = 2 // size
        mine = slice(number * heads, (number + 1) * heads)
        caches = [each[:, :, mine].clone() for each in self._right]
        caches += [each.clone() for each in [*self._pages, *self._states]]
        caches += [each[:, :, mine].clone() for each in self._drafts]
        return Rank(replace(layout, tp_rank=number, tp_size=size), caches)

    def _prefill(self, number: int, store: Store) -> Reason | None:
        """Saves a prompt as one rank of P does. Returns why D will not get it, or None."""
        rank = self._prefills[number]
        mover = self._mover(rank, store if self.rules.checks_chain else BlindStore(store))
        if number == 0 and not self.shape.relayed:
            started = self._handoff.started_marker(self.namespace, self.namespace.num_shards, 0)
            self._mark(mover, self._started, started)
        ends = {self.keys.num_tokens: self.keys.num_tokens - 1} if self.rules.saves_states else {}
        prompt = self._prompt(rank, self.keys, ends)
        work = SaveWork(mover, prompt, SavePlan(self.keys, handoff=self._handoff))
        job = Job(Direction.SAVE, work, num_bytes=1, timeout_s=60)
        last = self.shape.num_ranges - 1
        for n in range(last + 1):
            pieces = Split(1).ranges(0, len(self.keys), 2)
            if n == last and self.shape.has_draft:
                work.release(pieces, None, layer_range=rank.layout.draft_range, is_last=False)
            work.release(pieces, None, layer_range=n if last else None, is_last=n == last)
        result = carry(job)
        assert result is not None
        if result.reason is not None and self.rules.tells_failure:
            self._mark(mover, self.failed, self._handoff.marker(self.namespace, 0, 1, 0))
        return result.reason

    def _beat(self, store: Store) -> None:
        for number in range(self.shape.num_beats * self.rules.beats):
            put_beat(store, self.namespace, INSTANCE, number)

    def _decode(self, store: ReplayStore) -> Taken:
        """Looks a hand-off up and loads it as D does."""
        for cache in self._decode_rank.caches:
            cache.fill_(POISON)
        handoff = Handoff(self._handoff, num_tokens=self.shape.num_tokens)
        if not self.shape.relayed:
            handoff = Handoff(HandoffId(self._handoff.hex))
        found = self._look_up(store, handoff)
        result, num_with_drafts = JobResult(0), 0
        if found.num_tokens:
            result, num_with_drafts = self._load(store, found)
        result = replace(result, reason=result.reason or found.reason)
        return Taken(result, self._is_right(result.num_tokens, num_with_drafts))

    def _is_right(self, num_tokens: int, num_with_drafts: int) -> bool:
        """Returns whether D has P's tokens, all of their pages, and the state after them.

        And of the drafts, what the load says.
        """
        caches = iter(self._decode_rank.caches)
        ids = BLOCK_IDS[:num_tokens]
        pairs = [(next(caches)[ids], right[ids]) for right in self._right]
        ids = BLOCK_IDS[: -(-num_tokens // 2)]
        pairs += [(next(caches)[ids], right[ids]) for right in self._pages]
        at_d = [next(caches) for _ in self._states]
        if num_tokens:
            pairs += [
                (got[0], right[num_tokens - 1])
                for got, right in zip(at_d, self._states, strict=True)
            ]
        ids = BLOCK_IDS[:num_with_drafts]
        pairs += [(next(caches)[ids], right[ids]) for right in self._drafts]
        return all(torch.equal(got, right) for got, right in pairs)

    def _look_up(self, store: ReplayStore, handoff: Handoff) -> Match:
        lookup = Lookup(self.keys, handoff, 60.0, lambda _: None, follows=self.shape.follows)
        watch = Watch(store, self.rules)
        verdicts: list[Verdict | Exception] = []
        wait = HandoffWait(
            lookup, self.namespace, lambda _, why: verdicts.append(why), clock=watch.clock
        )
        try:
            while not (verdicts or watch.is_late):
                wanted = wait.wanted()
                for stored in watch.looks(wanted):
                    wait.on_search(stored, watch.clock.now)
                    if verdicts or wait.wanted() != wanted:
                        break
        except StoreError as error:
            return Match.miss(self.keys, reason_of(error))
        verdict = verdicts[0] if verdicts else Verdict.LATE
        if verdict is Verdict.BEGUN:
            return Match.following(self.keys, handoff)
        because = {Verdict.DONE: None, Verdict.FAILED: Reason.HANDOFF_FAILED}
        because |= {Verdict.DEAD: Reason.HANDOFF_DEAD, Verdict.GONE: Reason.HANDOFF_GONE}
        return find(store, self.keys, because.get(verdict, Reason.HANDOFF_LATE))

    def _load(self, store: ReplayStore, found: Match) -> tuple[JobResult, int]:
        entry = 0 if self.rules.takes_states else NO_BLOCK
        prompt = self._prompt(self._decode_rank, found.keys, {found.keys.num_tokens: entry})
        kind = LoadWork
        if self.shape.num_steps:
            kind = SteppedLoad if self.rules.asks_once else TornLoad
        work = kind(self._mover(self._decode_rank, store), prompt, 0, None)
        job = Job(Direction.LOAD, work, num_bytes=1, timeout_s=60)
        if found.follow is None:
            work.release(Split(1).ranges(0, len(found.keys), 2))
            work.close()
        else:
            self._follow(store, job, work, found.follow)
        result = carry(job)
        assert result is not None
        return result, job.num_with_drafts

    def _follow(self, store: ReplayStore, job: Job, work: LoadWork, handoff: HandoffId) -> None:
        watch = Watch(store, self.rules)
        follow = Follow(
            store,
            job,
            work,
            handoff,
            block_timeout_s=BLOCK_TIMEOUT_S,
            wake=lambda: None,
            clock=watch.clock,
        )

        steps = Steps(store, follow, watch.clock) if self.shape.num_steps else None
        while not follow.is_over:
            wanted = follow.wanted()
            with contextlib.suppress(StoreError):
                for stored in watch.looks(wanted):
                    follow.on_search(stored, watch.clock.now)
                    if follow.is_over or follow.wanted() != wanted:
                        break
            if isinstance(work, SteppedLoad):
                work.lock.meanwhile = steps
            carry(job)
            if isinstance(work, SteppedLoad):
                work.lock.meanwhile = None

    def _prompt(self, rank: Rank, keys: PromptKeys, states: Mapping[int, int]) -> PromptBlocks:
        """states: the entries of the states that are saved or loaded, by their ends."""
        tables = [BLOCK_IDS] * (1 + self.shape.has_pages) + [states] * self.shape.num_states
        return PromptBlocks(rank.layout, keys, tables)

    def _mover(self, rank: Rank, store: Store) -> Mover:
        swap = rank.swap if self.rules.verifies else TrustingSwap(rank.layout, rank.caches)
        copies = SwapCopies(rank.layout.geometry, swap)
        removed = reasons_with(Cause.BAD_VALUE)
        context = TransferContext(
            rank.layout.geometry, store, copies, self._metrics, removed, 1, pin=None, staged=None
        )
        return Mover(context, StagedTransfer(context, rank.staging, Split(1)))

    def _mark(self, mover: Mover, key: BlockKey, marker: Header) -> None:
        carry(Job(Direction.SAVE, MarkWork(mover, {key: marker}), timeout_s=60))
