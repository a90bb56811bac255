"""A closed loop: users ask an engine that has a queue, and leave; the pool is a model by its clock.

The engine is vLLM's steps: 12.5 ms and 37 us for each token of a prompt, at most 8,192 tokens in a
step, first come first served, while the KV of what runs fits in the GPU's 131,072 tokens. A user
brings a document of about 12,000 tokens, asks, reads an answer of 128 tokens, and asks again 0.5
to 3 s later; who has asked all questions leaves, and another comes with another document. Users
draw by seeds of their own, so every policy is asked the same.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from benchmarks.trace.replay import Clock
from pdstore.store.base import FRESH_S
from pdstore.store.memory import DEFAULT_LEASE_S

BLOCK_TOKENS = 256
LIVE_TOKENS = 14_650
"""The mean KV of a user who asks four questions: a pool's size is told in users times this."""
_GPU_TOKENS = 131_072 - 1024
_STEP_S = 0.0125
_STEP_TOKENS = 8192
_TOKENS_PER_S = 27_000
_LOAD_S = 0.03
_LOADED_PER_S = 100_000
_ANSWER_TOKENS = 128
_MOST_BLOCKS = 1024  # of a user


@cache
def name_of(block: int) -> bytes:
    """Returns the prefix hash that stands for a block."""
    return hashlib.blake2b(str(block).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Crowd:
    """Users who ask at the same time. questions: of each; the mean of them if it is_geometric.

    is_mixed: user i begins at question i modulo their number; else all begin at the first one.
    """

    num_users: int
    questions: int
    is_geometric: bool = False
    is_mixed: bool = False


@dataclass(frozen=True)
class Policy:
    """What decides which saves may evict. admission: makes it by a clock; None: plain LRU.

    knows_queue: what a waiting request found stays until it is served, and is looked up then again;
    ages run to lookups; the last save of a prompt counts as a use of all its blocks. If False, a
    lookup is made once and leases for 10 s, and ages run to loads, as with 62ee8012's `Admission`.
    """

    admission: Callable[[Clock], Any] | None = None
    knows_queue: bool = False


class Use(NamedTuple):
    """The last use of a stored block: when it was, and until when the block is kept."""

    at: float
    kept_until: float


class BlockPool:
    """An LRU list of blocks. room: blocks."""

    def __init__(self, room: int, clock: Clock) -> None:
        self._room, self._clock = room, clock
        self._uses: dict[int, Use] = {}  # in their order

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def num_stored(self, blocks: Sequence[int]) -> int:
        """Returns how many of the first blocks are stored."""
        return next((i for i, b in enumerate(blocks) if b not in self._uses), len(blocks))

    def use(self, blocks: Sequence[int], kept_until: float = -math.inf) -> None:
        """Counts a use of blocks; the last of them goes first."""
        for block in reversed(blocks):
            self._uses.pop(block, None)
            self._uses[block] = Use(self._clock(), kept_until)

    def keep(self, blocks: Sequence[int], kept_until: float) -> None:
        """Changes until when those of the blocks that are stored are kept."""
        for block in self._uses.keys() & blocks:
            self._uses[block] = self._uses[block]._replace(kept_until=kept_until)

    def in_the_way(self, blocks: Sequence[int]) -> dict[int, Use]:
        """Returns what may go, the oldest first, to make room for what is missing of the blocks."""
        missing = len(self._missing(blocks)) + len(self._uses) - self._room
        may_go = (each for each in self._uses.items() if each[1].kept_until < self._clock())
        return dict(islice(may_go, max(0, missing)))

    def put(self, blocks: Sequence[int], kept_until: float = -math.inf) -> None:
        """Stores what is missing of a part of a chain, as far as others may go for it."""
        missing = self._missing(blocks)
        for block in self.in_the_way(blocks):
            del self._uses[block]
        self.use(missing[: self._room - len(self._uses)], kept_until)

    def _missing(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block not in self._uses]


class User:
    """Somebody with a document, who asks questions about it."""

    def __init__(self, number: int, seed: int, crowd: Crowd) -> None:
        self.number, self._chance = number, random.Random(number * 31 + seed)
        document = random.Random(seed * 1_000_003 + number).lognormvariate(math.log(12_000), 0.5)
        self.num_tokens = min(29_200, max(512, int(document)))
        self.questions_left = crowd.questions
        if crowd.is_geometric:
            self.questions_left = 1
            while self._chance.random() < 1 - 1 / crowd.questions:
                self.questions_left += 1
        if crowd.is_mixed and number < crowd.num_users:
            self.questions_left -= number % crowd.questions
            self.num_tokens += number % crowd.questions * (320 + _ANSWER_TOKENS)

    def ask(self) -> None:
        self.num_tokens += self._chance.randrange(128, 512)
        self.questions_left -= 1

    def think_s(self) -> float:
        return self._chance.uniform(0.5, 3)

    def blocks(self, first: int = 0, stop: int = _MOST_BLOCKS) -> range:
        """Returns a part of the chain of blocks that all questions of this user extend."""
        start = self.number * _MOST_BLOCKS
        return range(start + first, start + stop)


@dataclass(eq=False)
class Request:
    """A question on its way. num_found, num_saved: blocks; num_computed: tokens of the prompt."""

    user: User
    num_tokens: int
    asked_at: float
    num_found: int = 0
    num_saved: int = 0
    ready_at: float = 0.0
    num_computed: int = 0
    answer_left: int = _ANSWER_TOKENS


class ClosedLoop:
    """An engine with its queue, its pool and its users. room: of the pool, in tokens."""

    def __init__(self, crowd: Crowd, policy: Policy, room: int, seed: int) -> None:
        self.clock = Clock()
        self.counts: Counter[str] = Counter()
        self._crowd, self._policy, self._seed = crowd, policy, seed
        self._pool = BlockPool(room // BLOCK_TOKENS, self.clock)
        self._admission = policy.admission and policy.admission(self.clock)
        self._num_users = 0
        self._num_due = crowd.num_users
        self._due: list[tuple[float, int, User | None]] = [  # None: a new user
            (0.1 * number, number, None) for number in range(crowd.num_users)
        ]
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self._gpu_free = _GPU_TOKENS

    def run(self, until_s: float) -> Counter[str]:
        """Goes on until this second; returns what happened since the last call.

        That is tokens "asked" and "loaded", "saves" and "refused" saves.
        """
        self.counts = Counter()
        while self.clock() < until_s:
            while self._due and self._due[0][0] <= self.clock():
                self._ask(heapq.heappop(self._due)[2])
            while self._queue and self._queue[0].num_tokens + _ANSWER_TOKENS <= self._gpu_free:
                self._start(self._queue.popleft())
            self._step()
        return self.counts

    def _ask(self, user: User | None) -> None:
        if user is None:
            user = User(self._num_users, self._seed, self._crowd)
            self._num_users += 1
        user.ask()
        request = Request(user, user.num_tokens, self.clock())
        self._look(request, math.inf if self._policy.knows_queue else DEFAULT_LEASE_S)
        self._queue.append(request)

    def _look(self, request: Request, lease_s: float) -> None:
        blocks = request.user.blocks(0, (request.num_tokens - 1) // BLOCK_TOKENS)
        request.num_found = self._pool.num_stored(blocks)
        self._pool.use(blocks[: request.num_found], self.clock() + lease_s)

    def _start(self, request: Request) -> None:
        if self._policy.knows_queue:
            self._look(request, FRESH_S)
        self._pool.keep(request.user.blocks(), self.clock() + FRESH_S)  # as a read leaves it
        if request.num_found:
            self._note("found", request, 0, request.num_found)
            there = self._pool.num_stored(request.user.blocks(0, request.num_found))
            request.num_found = request.num_saved = there
            request.num_computed = request.num_found * BLOCK_TOKENS
            request.ready_at = self.clock() + _LOAD_S + request.num_computed / _LOADED_PER_S
        self.counts["asked"] += request.num_tokens
        self.counts["loaded"] += request.num_computed
        self._gpu_free -= request.num_tokens + _ANSWER_TOKENS
        self._running.append(request)

    def _step(self) -> None:
        decoding = [r for r in self._running if r.num_computed == r.num_tokens]
        left = budget = _STEP_TOKENS - len(decoding)
        computing = []
        for request in self._running:
            if request.num_computed < request.num_tokens and request.ready_at <= self.clock():
                count = min(left, request.num_tokens - request.num_computed)
                request.num_computed += count
                left -= count
                computing.append(request)
        if not decoding and not computing:
            self.clock.now_s = max(self.clock() + 1e-4, self._next_event())
            return
        num_steps = 1
        if not computing:  # until the next event nothing happens but that all these get a token
            num_steps = math.ceil((self._next_event() - self.clock()) / _STEP_S)
            num_steps = max(1, min(num_steps, *(r.answer_left for r in decoding)))
        self.clock.now_s += num_steps * _STEP_S + (budget - left) / _TOKENS_PER_S
        for request in computing:
            self._save(request, request.num_computed // BLOCK_TOKENS)
            request.answer_left -= request.num_computed == request.num_tokens
        for request in decoding:
            request.answer_left -= num_steps
            if not request.answer_left:
                self._finish(request)

    def _next_event(self) -> float:
        """Returns when the next user asks or the next load ends, or a later time."""
        ready = (r.ready_at for r in self._running if r.ready_at > self.clock())
        return min([self.clock() + 3600, *ready, *(due[0] for due in self._due[:1])])

    def _finish(self, request: Request) -> None:
        user = request.user
        self._running.remove(request)
        self._gpu_free += request.num_tokens + _ANSWER_TOKENS
        user.num_tokens += _ANSWER_TOKENS
        self._save(request, user.num_tokens // BLOCK_TOKENS)
        self._num_due += 1
        due = self.clock() + user.think_s(), self._num_due, user if user.questions_left else None
        heapq.heappush(self._due, due)

    def _save(self, request: Request, stop: int) -> None:
        """Saves what was computed, up to the block `stop`, as `SaveWork` does it."""
        user, first = request.user, request.num_saved
        if stop <= first:
            return
        is_first = first == request.num_found
        request.num_saved = stop
        first += self._pool.num_stored(user.blocks(first, stop))
        self._note("found", request, 0 if is_first else first, first)
        self._note("saved", request, first, stop)
        self.counts["saves"] += 1
        blocks = user.blocks(first, stop)
        oldest = next(iter(self._pool.in_the_way(blocks).values()), None)
        if self._admission is not None and oldest is not None:
            is_hole = not is_first and not self._pool.num_stored(user.blocks(first - 1, first))
            if not self._admission.admits(self.clock() - oldest.at) or is_hole:
                self.counts["refused"] += 1
                return
        self._pool.put(blocks, self.clock() + FRESH_S)
        ends_prompt = stop == request.num_tokens // BLOCK_TOKENS
        if self._policy.knows_queue and ends_prompt:
            there = self._pool.num_stored(user.blocks())
            self._pool.use(user.blocks(0, there), self.clock() + FRESH_S)

    def _note(self, call: str, request: Request, first: int, stop: int) -> None:
        """Tells the admission of a use of blocks: `found` or `saved`."""
        if self._admission is not None:
            waited = [self.clock() - request.asked_at] if self._policy.knows_queue else []
            names = [name_of(block) for block in request.user.blocks(first, stop)]
            getattr(self._admission, call)(names, *waited)
