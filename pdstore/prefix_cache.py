"""PrefixCacheManager: keys, matches and hand-offs; the scheduler process's half, without tensors.

Locking. Lookups belong to the manager's one thread from `lookup` on; they hand their result over by
one assignment. The queue between the two is a deque.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdstore.errors import StoreError
from pdstore.handoff import Attempt, Handoff
from pdstore.job import reason_of
from pdstore.keys import Item, Json, Namespace, PromptKeys, Tokens
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.connect import connect_store, read_pool_id
from pdstore.types import Reason
from pdstore.workers import Deadline, Ticker

log = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.020
_POOL_ID_AGE_S = 10.0
_MATCH_S = 1.0  # what the last match of a hand-off may take beyond the wait for its marker


@dataclass(frozen=True)
class Match:
    """How much of a prompt the pool has.

    keys: the blocks that are stored; what `KVPool.load` takes.
    num_tokens: tokens in them.
    reason: why it is not the whole prompt; None if it is.
    """

    keys: PromptKeys
    num_tokens: int
    reason: Reason | None


class Lookup:
    """A match on its way. Ends by itself: with the answer, or when its time is up."""

    def __init__(
        self,
        keys: PromptKeys,
        handoff: Handoff | None,
        wait_s: float,
        count: Callable[[Match], None],
    ) -> None:
        self.keys = keys
        self._count = count
        self.handoff = handoff
        self.started_at = time.monotonic()
        self.marker_deadline = Deadline(wait_s)
        self.next_poll_at = 0.0
        self.poll_s = _FIRST_POLL_S
        self._deadline = Deadline(wait_s + (_MATCH_S if handoff else 0.0))
        self._answered = threading.Event()
        self._found: Match | None = None

    def poll(self) -> Match | None:
        """The match, or None: ask again later. Never blocks; never None after the deadline."""
        if self._found is None and self._deadline.is_over():
            self.finish(Match(self.keys.first(0), 0, Reason.DEADLINE))
        return self._found

    def wait(self, timeout_s: float) -> Match:
        """Waits for the match. Raises TimeoutError when there is none after the time."""
        end = Deadline(timeout_s)
        while (found := self.poll()) is None:
            if end.is_over():
                raise TimeoutError(f"no answer to the lookup after {timeout_s} s")
            self._answered.wait(min(_LAST_POLL_S, end.remaining_s()))
        return found

    def cancel(self) -> None:
        """Nobody waits for this any more."""
        self.finish(Match(self.keys.first(0), 0, Reason.CANCELLED))

    def finish(self, found: Match) -> None:
        """The first answer counts."""
        if self._found is None:
            self._found = found
            self._answered.set()
            self._count(found)

    @property
    def is_over(self) -> bool:
        return self.poll() is not None


class PrefixCacheManager:
    """Makes keys and finds out how much of a prompt the pool has. For one thread, the scheduler's.

    Raises ConfigError for a bad store URL, StoreError when the store is required and does not
    answer.
    """

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        *,
        metrics: Metrics | None = None,
        store: Store | None = None,
    ) -> None:
        self.namespace = namespace
        self.metrics = metrics or Metrics()
        self._settings = settings
        self._store = store or connect_store(settings, self.metrics)
        self._lookups: deque[Lookup] = deque()
        self._pool_id: bytes | None = None
        self._pool_id_deadline = Deadline(0.0)
        self._said: set[str] = set()
        self._thread = Ticker("pdstore-lookups", self._turn)

    def keys(
        self,
        token_ids: Tokens,
        *,
        lora: bytes = b"",
        cache_salt: bytes = b"",
        items: Sequence[Item] = (),
    ) -> PromptKeys:
        """The names of a prompt's blocks. Raises ValueError for an id that does not fit."""
        keys = PromptKeys(self.namespace, lora=lora, cache_salt=cache_salt, items=items)
        return keys.extend(token_ids)

    def match(self, keys: PromptKeys) -> Match:
        """How much of the prompt the pool has now. May block; an error of the store is a miss."""
        found = self._match(keys, None)
        self._count(found)
        return found

    def lookup(self, keys: PromptKeys, params: Mapping[str, Json] | None = None) -> Lookup:
        """Starts a match and returns at once; a hand-off in `params` waits for P's marker, bounded.

        params: the request's `kv_transfer_params`; None, or without "pdstore": the pool as it is
        now. Raises ValueError for a hand-off that is malformed.
        """
        handoff = Handoff.of(params)
        wait_s = self._settings.handoff_wait_s if handoff else self._settings.lookup_wait_s
        lookup = Lookup(keys.first(keys.num_tokens), handoff, wait_s, self._count)
        if handoff is not None and handoff.namespace not in (None, self.namespace.hex):
            self._say_namespace(handoff)
            lookup.finish(Match(keys.first(0), 0, Reason.NAMESPACE))
            return lookup
        self._lookups.append(lookup)
        self._thread.wake()
        return lookup

    def announce(
        self, keys: PromptKeys, params: Mapping[str, Json] | None = None
    ) -> tuple[Attempt, dict[str, Json]]:
        """P: a new hand-off for `KVPool.save`, and the `kv_transfer_params` of P's answer.

        params: the request's own; an attempt in them (a router that asks P and D at once) is taken
          over.
        A read-only instance (PDSTORE_PUBLISH=0) has nothing to announce: its answer says nothing.
        """
        asked = Handoff.of(params)
        attempt = asked.attempt if asked else Attempt.new()
        handoff = Handoff(
            attempt=attempt,
            num_tokens=keys.num_tokens,
            namespace=self.namespace.hex,
            pool_id=self._pool_id.hex() if self._pool_id else None,
            fields=self.namespace.describe(),
        )
        return attempt, handoff.params() if self._settings.publish else {}

    def close(self) -> None:
        """Ends the lookups and the store's connections. Twice is fine."""
        self._thread.stop(1.0)
        for lookup in self._lookups:
            lookup.cancel()
        self._store.close()

    def _turn(self) -> float | None:
        """One turn of the thread: each lookup that is due makes one step."""
        self._refresh_pool_id()
        now = time.monotonic()
        for lookup in [self._lookups.popleft() for _ in range(len(self._lookups))]:
            if lookup.next_poll_at <= now:
                found = self._step(lookup)
                if found is not None:
                    lookup.finish(found)
            if not lookup.is_over:
                self._lookups.append(lookup)
        if not self._lookups:
            return self._pool_id_deadline.remaining_s()
        return max(0.0, min(lookup.next_poll_at for lookup in self._lookups) - time.monotonic())

    def _step(self, lookup: Lookup) -> Match | None:
        if lookup.is_over:
            return None
        handoff = lookup.handoff
        if handoff is None:
            return self._match(lookup.keys, None)
        if not self._is_same_pool(handoff):
            return Match(lookup.keys.first(0), 0, Reason.OTHER_POOL)
        try:
            state = self._state_of(handoff)
        except StoreError as error:
            return Match(lookup.keys.first(0), 0, reason_of(error))
        if state == "done":
            self.metrics.handoff_wait_seconds.observe(time.monotonic() - lookup.started_at)
            return self._match(lookup.keys, None)
        if state == "failed":
            return self._match(lookup.keys, Reason.HANDOFF_FAILED)
        if lookup.marker_deadline.is_over():
            return self._match(lookup.keys, Reason.HANDOFF_LATE)
        lookup.next_poll_at = time.monotonic() + lookup.poll_s
        lookup.poll_s = min(lookup.poll_s * 1.3, _LAST_POLL_S)
        return None

    def _state_of(self, handoff: Handoff) -> str | None:
        """What P's markers say: done when all shards are, failed when one is, else None."""
        shards = sorted({part.shard for part in self.namespace.parts})
        done = [handoff.attempt.marker(self.namespace, shard, "done") for shard in shards]
        if self._store.match(done) == len(done):
            return "done"
        failed = [handoff.attempt.marker(self.namespace, shard, "failed") for shard in shards]
        return "failed" if any(self._store.match([marker]) for marker in failed) else None

    def _match(self, keys: PromptKeys, because: Reason | None) -> Match:
        """Matches whole blocks; `because` says why some may be missing, if that is known."""
        parts = self.namespace.parts
        try:
            num_blocks = self._store.match(keys.keys(parts)) // len(parts)
        except StoreError as error:
            return Match(keys.first(0), 0, reason_of(error))
        num_tokens = keys.end_of(num_blocks)
        if num_tokens == keys.num_tokens:
            return Match(keys, num_tokens, None)
        return Match(keys.first(num_tokens), num_tokens, because or Reason.ABSENT)

    def _count(self, found: Match) -> None:
        self.metrics.tokens.labels("matched").inc(found.num_tokens)
        if found.reason is not None:
            self.metrics.miss(found.reason)

    def _refresh_pool_id(self) -> None:
        if self._pool_id_deadline.is_over():
            self._pool_id_deadline = Deadline(_POOL_ID_AGE_S)
            with contextlib.suppress(StoreError):  # the calls that matter say so
                self._pool_id = read_pool_id(self._store)

    def _is_same_pool(self, handoff: Handoff) -> bool:
        """Whether P writes where this instance reads; looks twice before it says no."""
        if handoff.pool_id is None or self._pool_id is None:
            return True
        if handoff.pool_id == self._pool_id.hex():
            return True
        self._pool_id_deadline = Deadline(0.0)
        self._refresh_pool_id()
        if handoff.pool_id == self._pool_id.hex():
            return True
        self._say(
            f"the prefill instance's pool is {handoff.pool_id[:8]}, this one's is"
            f" {self._pool_id.hex()[:8]} at {self._store.label}: give both the same PDSTORE_STORE"
        )
        return False

    def _say_namespace(self, handoff: Handoff) -> None:
        differences = self.namespace.differences(handoff.fields)
        self._say("the prefill instance's KV does not fit this one: " + "; ".join(differences))

    def _say(self, message: str) -> None:
        """Logs a standing mismatch once, not once per request."""
        if message not in self._said and len(self._said) < 64:
            self._said.add(message)
            log.warning(message)
