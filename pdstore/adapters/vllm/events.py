"""PoolEvents: tells routers, as events of vLLM's KV cache, which blocks the pool has."""

# Decision: docs/decisions/051-events.md
from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from pdstore.adapters.vllm.messages import SaveSpec
from pdstore.engine.job_end import JobEnd
from pdstore.errors import Direction, StoreError
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.scheduler.lookup import Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.store.optional import TellsRemovals
from pdstore.threads import Ticker

log = logging.getLogger("vllm.pdstore")

MEDIUM = "EXTERNAL"
"""The medium of all events: Dynamo's name for what lies beyond the engine's host memory and disk.
Dynamo takes a name that it does not know, such as STORAGE in its older versions, for the GPU."""
MOST_HASHES = 1 << 19  # vLLM's blocks that one instance keeps in mind: about 100 MiB
_DUTY = 0.01  # the part of the time that checks for removals may take
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 10.0
_MOST_KEYS = 512  # of one call: it takes about a millisecond


@dataclass
class _Save:
    """A planned save: the leading tokens that are stored so far, and the ranks that still save."""

    request: Any
    keys: PromptKeys
    first_token: int
    num_tokens: int
    num_ranks: int


@dataclass
class _Block:
    """A block of the pool that routers know.

    name: its hash in the pool's keys. hashes: of vLLM's blocks in it, as events give them.
    number: another one whenever this instance has stored or found it again.
    """

    name: bytes
    hashes: Sequence[Any]
    number: int


class PoolEvents:
    """Collects events about the blocks that this instance has stored or found in the pool.

    A block of the pool may be several of vLLM's: they are told of together. It is there when all
    ranks have stored all parts that an engine needs of every block, so without windows and states.
    A thread asks the store from time to time which blocks are gone, whoever has removed them.

    Only the scheduler's thread may call it. Before `begin`, and if it is off, its calls do nothing.

    num_ranks: how many workers take part in each save.
    is_on: True if vLLM publishes events.
    most_hashes: the most of vLLM's blocks to keep in mind. Beyond it, those stored or found longest
      ago are told to be removed, so that no router keeps what nobody watches.
    """

    def __init__(
        self, num_ranks: int = 1, *, is_on: bool = False, most_hashes: int = MOST_HASHES
    ) -> None:
        self._num_ranks = num_ranks
        self._is_on = is_on
        self._most_hashes = most_hashes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Any, _Block] = OrderedDict()  # by the hash of vLLM's last block
        self._num_blocks_with: Counter[Any] = Counter()  # by the hash of one of vLLM's blocks
        self._events: list[BlockStored | BlockRemoved] = []
        self._saves: dict[int, _Save] = {}  # by number
        self._block_pool: Any = None
        self._cached: Any = None
        self._round: list[Any] = []  # the names that this round of checks has not come to
        self._num_notes = 0
        self._watch: _Watch | None = None
        self._thread: Ticker | None = None

    def __len__(self) -> int:
        """Returns how many events there are to take."""
        return len(self._events)

    def begin(self, cache: PrefixCacheManager, block_tokens: int, block_pool: Any) -> None:
        """Begins to collect events, if the store can tell which blocks are gone.

        block_tokens: tokens of one of vLLM's blocks. block_pool: vLLM's BlockPool.
        """
        if not self._is_on:
            return
        namespace, removals = cache.namespace, cache.removals
        needs = namespace.continuation.needs
        parts = [part for part in namespace.parts if part.group not in needs]
        if removals is None or not parts:
            why = (
                "every layer has a window or a state" if removals else "the store tells no removals"
            )
            log.warning("no events about the pool: %s", why)
            return
        hash_tokens = getattr(block_pool, "hash_block_size", block_tokens)
        self._size = namespace.block_tokens, block_tokens, hash_tokens
        self._block_pool, self._cached = block_pool, _cached_in(block_pool)
        heads = [namespace.key_prefix(part) for part in parts]
        self._watch = _Watch(removals, heads)
        self._thread = Ticker("pdstore-events", self._check)

    def planned(self, request: Any, saves: list[SaveSpec]) -> list[SaveSpec]:
        """Notes the saves of a request that the ranks are told to make; returns them."""
        for save in saves if self._watch is not None else ():
            plan = save.plan
            self._saves[save.number] = _Save(
                request, plan.keys, plan.first_token, plan.keys.num_tokens, self._num_ranks
            )
        return saves

    def job_ended(self, end: JobEnd) -> None:
        """Tells of the blocks of a save that has ended on all ranks."""
        if end.direction is not Direction.SAVE or end.number not in self._saves:
            return
        save = self._saves[end.number]
        save.num_tokens = min(save.num_tokens, end.num_tokens)
        save.num_ranks -= 1
        if not save.num_ranks:
            del self._saves[end.number]
            if save.num_tokens > save.first_token:
                self._note(save.request, save.keys, save.num_tokens)

    def found(self, request: Any, match: Match | None) -> None:
        """Tells of the blocks that a lookup has found, but for those that P still saves."""
        if self._watch is not None and match is not None and match.follow is None:
            self._note(request, match.keys, match.num_tokens)

    def forget(self) -> None:
        """Tells that all blocks are gone, because no request of this instance will ask for them."""
        with self._lock:
            self._saves.clear()
            self._remove(list(self._blocks))

    def take(self) -> list[Any]:
        """Returns the events since the last call, in order.

        vLLM takes its own events just before. If they say that all blocks are cleared, routers drop
        the pool's blocks, too: they are told anew when they are stored or found again.
        """
        if self._cached is not (cached := _cached_in(self._block_pool)):
            self._cached = cached
            with self._lock:
                self._remove(list(self._blocks))
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop(timeout_s=1.0)

    def _note(self, request: Any, keys: PromptKeys, num_tokens: int) -> None:
        """Notes whole blocks that are in the pool, the last one first, and tells of new ones.

        Those before a save's first one, too: no lookup may have told of them, as where the engine
        had them itself, and routers leave out a block whose parent they do not know. Should one of
        them be gone, a check tells of that.
        """
        pool_tokens, block_tokens, hash_tokens = self._size
        hashes = getattr(request, "block_hashes", ())
        if hash_tokens != block_tokens:
            view = kv_cache_utils.BlockHashListWithBlockSize
            hashes = view(hashes, hash_tokens, block_tokens)
        size = pool_tokens // block_tokens
        names = keys.hashes(0, min(num_tokens // pool_tokens, len(hashes) // size))
        new: dict[int, Any] = {}  # hashes of vLLM's blocks that routers do not know, by number
        with self._lock:
            self._num_notes += 1
            for number in reversed(range(len(names))):  # stores evict a prompt from its end
                name, first = names[number], number * size
                last = hashes[first + size - 1]
                if (known := self._blocks.get(last)) is not None:
                    known.name, known.number = name, self._num_notes
                    self._blocks.move_to_end(last)
                    continue
                own = [*map(_published, hashes[first : first + size])]
                new |= {
                    first + at: each
                    for at, each in enumerate(own)
                    if each not in self._num_blocks_with
                }
                self._num_blocks_with.update(own[:-1])
                self._blocks[last] = _Block(name, own, self._num_notes)
            for start, stop in _runs(sorted(new)):
                shown = [new[number] for number in range(start, stop)]
                self._events.append(_stored(request, hashes, shown, start, block_tokens))
            most = self._most_hashes // size
            self._remove([*itertools.islice(self._blocks, max(0, len(self._blocks) - most))])

    def _remove(self, names: Sequence[Any]) -> None:
        """Forgets blocks and tells that they are gone. The caller holds the lock.

        Two prompts may part within a block of the pool: then a block of vLLM's is in two of the
        pool's, and stays until both are gone. It was told of once, since routers that count how
        often a block is stored would wait for as many removals.
        """
        gone = []
        for name in names:
            *others, last = self._blocks.pop(name).hashes
            for shared in others:
                self._num_blocks_with[shared] -= 1
                if not self._num_blocks_with[shared]:
                    del self._num_blocks_with[shared]
                    gone.append(shared)
            gone.append(last)
        if gone:
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM))

    def _check(self) -> float:
        """Asks for some blocks whether they are gone; returns the seconds until the next check.

        It asks for those used longest ago each time, because a full store evicts them first, and
        in turn for all others.
        """
        assert self._watch is not None
        began = time.monotonic()
        with self._lock:
            names = self._next_names(max(1, _MOST_KEYS // len(self._watch.heads) // 2))
            asked = {name: (block, block.number) for name in names if (block := self._blocks[name])}
        try:
            gone = self._watch.gone_among({block.name for block, _ in asked.values()})
        except StoreError:
            return _LONGEST_PAUSE_S
        with self._lock:
            self._remove(
                [
                    name
                    for name, (block, number) in asked.items()
                    if block.name in gone
                    and self._blocks.get(name) is block
                    and block.number == number  # else it may have been stored again since
                ]
            )
        pause = (time.monotonic() - began) / _DUTY
        return min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)

    def _next_names(self, count: int) -> Iterable[Any]:
        """Returns the blocks of the next check. The caller holds the lock."""
        self._round = self._round or [*reversed(self._blocks)]
        some, self._round = self._round[-count:], self._round[:-count]
        oldest = itertools.islice(self._blocks, count)
        return dict.fromkeys([*oldest, *(name for name in some if name in self._blocks)])


@dataclass(frozen=True)
class _Watch:
    """Asks a store for blocks. heads: how the keys of a block's parts begin."""

    removals: TellsRemovals
    heads: Sequence[str]

    def gone_among(self, names: Iterable[bytes]) -> set[bytes]:
        """Returns the blocks of which a part is gone, by their hashes. Raises StoreError."""
        blocks = list(names)
        keys = [BlockKey(head + name.hex()) for name in blocks for head in self.heads]
        gone = self.removals.which_removed(keys) if keys else []
        step = len(self.heads)
        return {name for at, name in enumerate(blocks) if any(gone[at * step : (at + 1) * step])}


def _cached_in(block_pool: Any) -> Any:
    """Returns vLLM's table of cached blocks: another object after each reset."""
    return getattr(block_pool, "cached_block_hash_to_block", None)


def _published(block_hash: Any) -> Any:
    return kv_cache_utils.maybe_convert_block_hash(block_hash)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first number of each run of consecutive numbers, and the one after its last."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], numbers[at - 1] + 1
            start = at


def _stored(
    request: Any, hashes: Sequence[Any], shown: list[Any], start: int, block_tokens: int
) -> BlockStored:
    """Returns the event of some consecutive blocks of vLLM's, as its own block pool makes it.

    shown: their hashes as events give them. start: the number of the first one.
    """
    stop = start + len(shown)
    lora = request.lora_request
    return BlockStored(
        block_hashes=shown,
        parent_block_hash=_published(hashes[start - 1]) if start else None,
        token_ids=list(request.all_token_ids[start * block_tokens : stop * block_tokens]),
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora is not None else None,
        medium=MEDIUM,
        lora_name=lora.name if lora is not None else None,
        extra_keys=_extra_keys(request, start, stop, block_tokens),
    )


def _extra_keys(request: Any, start: int, stop: int, block_tokens: int) -> list[Any]:
    """Returns what else the hashes of some blocks depend on: for each block a tuple, or None."""
    if not (request.lora_request or request.mm_features or request.cache_salt):
        return [None] * (stop - start)
    keys = [
        kv_cache_utils.generate_block_hash_extra_keys(
            request, number * block_tokens, (number + 1) * block_tokens, 0
        )[0]
        for number in range(start, stop)
    ]
    untag = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
    return list(untag(keys))
