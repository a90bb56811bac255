"""PrefixCacheManager: keys, matches and hand-offs; the scheduler process's half, without tensors.

Locking. Lookups belong to the manager's one thread from `lookup` on; they hand their result over by
one assignment. The queue between the two is a deque.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from pdstore.errors import StoreError
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import MultimodalItem, PromptKeys, Tokens
from pdstore.format.namespace import Json, Namespace
from pdstore.metrics import Metrics
from pdstore.outcome import Reason, reason_of
from pdstore.scheduler.lookup import LAST_POLL_S, Lookup, Match
from pdstore.scheduler.matching import num_usable
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.connect import connect_store, read_pool_id
from pdstore.threads import Deadline, Ticker

log = logging.getLogger(__name__)

_POLLS_PER_FAILED = 3  # polls for `done` between two for `failed`, which is rare
_POOL_ID_AGE_S = 10.0
_SILENCE_S = 600.0


class PrefixCacheManager:
    """Makes keys and finds out how much of a prompt the pool has. For one thread, the scheduler's.

    store: the caller's, who closes it; None opens PDSTORE_STORE.
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
        self._owns_store = store is None
        self._store = store or connect_store(settings, self.metrics)
        self._lookups: deque[Lookup] = deque()
        self._pool_id: bytes | None = None
        self._pool_id_deadline = Deadline(0.0)
        self._former_pool_id: bytes | None = None  # until P must have seen the new one too
        self._former_pool_id_deadline = Deadline(0.0)
        self._said: OrderedDict[str, Deadline] = OrderedDict()
        self._next_words = Deadline(0.0)
        self._closed = False
        self._pid = os.getpid()
        self._turn_deadline: Deadline | None = None  # while the thread is in a store call
        self._thread = Ticker("pdstore-lookups", self._turn)

    def keys(
        self,
        token_ids: Tokens,
        *,
        lora: bytes = b"",
        cache_salt: bytes = b"",
        items: Sequence[MultimodalItem] = (),
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
        lookup = Lookup(keys.prefix(keys.num_tokens), handoff, wait_s, self._count)
        if handoff is not None and handoff.namespace not in (None, self.namespace.hex):
            self._say_namespace(handoff)
            lookup.finish(Match(keys.prefix(0), 0, Reason.NAMESPACE))
            return lookup
        refusal = self._refuse()
        if refusal is not None:
            lookup.finish(Match(keys.prefix(0), 0, refusal))
            return lookup
        self._lookups.append(lookup)
        self._thread.wake()
        return lookup

    def announce(
        self, keys: PromptKeys, params: Mapping[str, Json] | None = None
    ) -> tuple[HandoffId, dict[str, Json]]:
        """P: a new hand-off for `KVPool.save`, and the `kv_transfer_params` of P's answer.

        params: the request's own; an attempt in them (a router that asks P and D at once) is taken
          over.
        A read-only instance (PDSTORE_PUBLISH=0) has nothing to announce: its answer says nothing.
        """
        asked = Handoff.of(params)
        attempt = asked.attempt if asked else HandoffId.new()
        handoff = Handoff(
            attempt=attempt,
            num_tokens=keys.num_tokens,
            namespace=self.namespace.hex,
            pool_id=self._pool_id.hex() if self._pool_id else None,
            fields=self.namespace.describe(),
        )
        return attempt, handoff.params() if self._settings.publish else {}

    def clear(self) -> bool:
        """Forgets all that the pool has of this namespace, whoever saved it. From any thread.

        True when it is gone. False, and a line in the log, when the store errs: some may be gone
        then. Blocks for as long as the store looks through its keys. What is being saved meanwhile
        may be stored afterwards: end those jobs first.
        """
        try:
            self._store.clear(self.namespace.hex)
        except StoreError as error:
            log.warning("namespace %s is not cleared: %s", self.namespace.hex, error)
            return False
        log.info("cleared namespace %s of %s", self.namespace.hex, self._store.label)
        return True

    def close(self) -> None:
        """Ends the lookups and the connections that are its own. Twice is fine."""
        self._closed = True
        self._thread.stop(1.0)
        while self._lookups:
            self._lookups.popleft().finish(Match(PromptKeys(self.namespace), 0, Reason.CLOSED))
        if self._owns_store:
            self._store.close()

    def _refuse(self) -> Reason | None:
        """Why a lookup cannot be answered now: then it need not wait for its deadline."""
        if self._closed or os.getpid() != self._pid:
            return Reason.CLOSED
        turn = self._turn_deadline
        return Reason.STORE_SLOW if turn is not None and turn.is_over() else None

    def _turn(self) -> float | None:
        """One turn of the thread: each lookup that is due makes one step."""
        self._turn_deadline = Deadline(self._settings.lookup_wait_s)
        self._refresh_pool_id()
        due = [self._lookups.popleft() for _ in range(len(self._lookups))]
        due.sort(key=lambda lookup: lookup.handoff is not None)  # who only matches need not wait
        try:
            while due:
                self._turn_deadline = Deadline(self._settings.lookup_wait_s)
                self._advance(due.pop(0))
        finally:
            self._lookups.extend(due)
            self._turn_deadline = None
        if not self._lookups:
            return self._pool_id_deadline.remaining_s()
        return max(0.0, min(lookup.next_poll_at for lookup in self._lookups) - time.monotonic())

    def _advance(self, lookup: Lookup) -> None:
        """Answers a lookup or puts it back; one that cannot even be asked about is a fault."""
        found: Match | None = Match(lookup.keys.prefix(0), 0, Reason.FAULT)
        try:
            found = self._step(lookup) if lookup.next_poll_at <= time.monotonic() else None
        finally:
            if found is not None:
                lookup.finish(found)
            if not lookup.is_over:
                self._lookups.append(lookup)

    def _step(self, lookup: Lookup) -> Match | None:
        """Asks the store what this lookup waits for next; None: it goes on waiting."""
        handoff = lookup.handoff
        if lookup.is_over:
            return None
        if handoff is None:
            return self._match(lookup.keys, None)
        if not self._is_same_pool(handoff):
            return Match(lookup.keys.prefix(0), 0, Reason.OTHER_POOL)
        try:
            is_over, because = self._look_for_markers(lookup, handoff)
        except StoreError as error:
            return Match(lookup.keys.prefix(0), 0, reason_of(error))
        if is_over:
            return self._match(lookup.keys, because)
        lookup.next_poll_at = time.monotonic() + lookup.poll_s
        lookup.poll_s = min(lookup.poll_s * 1.3, LAST_POLL_S)
        return None

    def _look_for_markers(self, lookup: Lookup, handoff: Handoff) -> tuple[bool, Reason | None]:
        """Whether there is nothing left to wait for, and why the prompt may not be whole then."""
        attempt, namespace = handoff.attempt, self.namespace
        done = [attempt.done(namespace, shard) for shard in range(namespace.num_shards)]
        if self._store.match(done) == len(done):
            self.metrics.handoff_wait_seconds.observe(time.monotonic() - lookup.started_at)
            return True, None
        lookup.num_polls += 1
        if lookup.num_polls % _POLLS_PER_FAILED == 0 and self._store.match(
            [attempt.failed(namespace)]
        ):
            return True, Reason.HANDOFF_FAILED
        return lookup.marker_deadline.is_over(), Reason.HANDOFF_LATE

    def _match(self, keys: PromptKeys, because: Reason | None) -> Match:
        """Matches whole blocks; `because` says why some may be missing, if that is known."""
        try:
            num_blocks = num_usable(self._store, keys)
        except StoreError as error:
            return Match(keys.prefix(0), 0, reason_of(error))
        num_tokens = keys.end_of(num_blocks)
        if num_tokens == keys.num_tokens:
            return Match(keys, num_tokens, None)
        return Match(keys.prefix(num_tokens), num_tokens, because or Reason.ABSENT)

    def _count(self, found: Match) -> None:
        self.metrics.tokens.labels("matched").inc(found.num_tokens)
        if found.reason is not None:
            self.metrics.miss(found.reason)

    def _refresh_pool_id(self) -> None:
        if self._pool_id_deadline.is_over():
            self._pool_id_deadline = Deadline(_POOL_ID_AGE_S)
            with contextlib.suppress(StoreError):  # the calls that matter say so
                pool_id = read_pool_id(self._store)
                if pool_id != self._pool_id:
                    self._former_pool_id, self._pool_id = self._pool_id, pool_id
                    self._former_pool_id_deadline = Deadline(2 * _POOL_ID_AGE_S)

    def _is_same_pool(self, handoff: Handoff) -> bool:
        """Whether P writes where this instance reads; looks twice before it says no.

        A store that came back empty is another pool, and P may not have noticed yet.
        """
        if handoff.pool_id is None or self._pool_id is None:
            return True
        if self._is_pool(handoff.pool_id):
            return True
        self._pool_id_deadline = Deadline(0.0)
        self._refresh_pool_id()
        if self._is_pool(handoff.pool_id):
            return True
        self._say(
            f"the prefill instance's pool is {handoff.pool_id[:8]}, this one's is"
            f" {self._pool_id.hex()[:8]} at {self._store.label}: give both the same PDSTORE_STORE"
        )
        return False

    def _is_pool(self, pool_id: str) -> bool:
        known = [self._pool_id]
        if not self._former_pool_id_deadline.is_over():
            known.append(self._former_pool_id)
        return pool_id in (each.hex() for each in known if each is not None)

    def _say_namespace(self, handoff: Handoff) -> None:
        differences = self.namespace.differences(handoff.fields)
        self._say("the prefill instance's KV does not fit this one: " + "; ".join(differences))

    def _say(self, message: str) -> None:
        """Logs a standing mismatch once in a while, however often clients make one."""
        last = self._said.get(message)
        if (last is not None and not last.is_over()) or not self._next_words.is_over():
            return
        self._next_words = Deadline(1.0)
        self._said[message] = Deadline(_SILENCE_S)
        while len(self._said) > 64:
            self._said.popitem(last=False)
        log.warning(message)
