"""PrefixCacheManager: keys, matches and hand-offs; the scheduler process's half, without tensors.

Plain lookups and hand-offs have a thread each, so that neither waits for the other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pdstore.errors import Reason, StoreError
from pdstore.format.handoff import Handoff, HandoffId, new_id
from pdstore.format.keys import FORMAT_VERSION, Json, MultimodalItem, Namespace, PromptKeys, Tokens
from pdstore.metrics import Metrics
from pdstore.scheduler.handoff_watch import HandoffWatch
from pdstore.scheduler.lookup import Lookup, LookupQueue, Match, find, handed_over
from pdstore.scheduler.mismatch import Mismatches
from pdstore.settings import LOOKUP_WAIT_S, Settings, doubts_of
from pdstore.store.base import Store
from pdstore.store.connect import RoomWatch, connect_store
from pdstore.store.wrappers import problem_of
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

_STOP_S = 1.0  # of all threads; a store's own close has the second one
_RELAY = "relay the kv_transfer_params of its answer"


class PrefixCacheManager:
    """Makes keys and finds out how much of a prompt the pool has.

    For one thread, the scheduler's, and for no signal handler: locks are taken.

    store: None opens PDSTORE_STORE; one that is given stays the caller's to close.
    longest_prompt: tokens of the longest prompt that the engine takes; None: not known.
    router_duty: the router's part in a hand-off, for the log of a D that finds nothing.
    lookup_wait_s: how long a prompt without a hand-off waits for the store's answer.
    weights_of: as `weights_revision`; with it D warns of an equal PDSTORE_WEIGHTS of other files.
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
        longest_prompt: int | None = None,
        router_duty: str = _RELAY,
        weights_of: Callable[[Settings], str] | None = None,
        lookup_wait_s: float = LOOKUP_WAIT_S,
    ) -> None:
        self.namespace = namespace
        self.metrics = metrics or Metrics()
        self._settings = settings
        self._owns_store = store is None
        self._store = store or connect_store(settings, self.metrics)
        self.metrics.describe(FORMAT_VERSION, settings.role, namespace.hex, self._store.label)
        for doubt in doubts_of(settings, longest_prompt):
            log.warning("%s: %s", *doubt)
        self._room = RoomWatch(self._store, self.metrics)
        self._instance = new_id()
        self._last_save: str | None = None  # why it fell short
        self._mismatches = Mismatches(
            settings, namespace, self._store, router_duty=router_duty, weights_of=weights_of
        )
        self._closed = False
        self._pid = os.getpid()
        self._lookup_wait_s = lookup_wait_s
        ask = partial(find, self._store)
        self._queue = LookupQueue(ask, lookup_wait_s)
        self._watch = HandoffWatch(
            self._store,
            namespace,
            self.metrics,
            ask,
            patience_s=lookup_wait_s,
            is_elsewhere=self._mismatches.is_elsewhere,
        )

    def keys(
        self,
        token_ids: Tokens,
        *,
        lora: bytes = b"",
        cache_salt: bytes = b"",
        items: Sequence[MultimodalItem] = (),
    ) -> PromptKeys:
        """Returns the names of a prompt's blocks.

        token_ids: the prompt's, each in [0, 2**31).
        lora, cache_salt, items: as `PromptKeys` takes them.
        Raises ValueError for an id that does not fit.
        """
        keys = PromptKeys(self.namespace, lora=lora, cache_salt=cache_salt, items=items)
        return keys.extend(token_ids)

    def match(self, keys: PromptKeys) -> Match:
        """Returns how much of the prompt the pool has now. Blocks; an error of the store is a miss.

        A store that hangs blocks it for as long: `lookup` does not.
        """
        refusal = self._refuse()
        found = Match.miss(keys, refusal) if refusal else find(self._store, keys)
        self._count(keys, None, found)
        return found

    def lookup(self, keys: PromptKeys, params: Mapping[str, Json] | None = None) -> Lookup:
        """Starts a match and returns at once; with a hand-off it waits for P's markers, bounded.

        params: the request's `kv_transfer_params`; None, or without "pdstore": the pool as it is
          now. With a hand-off of a prompt that is a little shorter than `keys`, the match is of
          that prompt.
        Raises ValueError for a hand-off that is malformed.
        """
        return self._start(keys, params, follows=False)

    def follow(self, keys: PromptKeys, params: Mapping[str, Json] | None = None) -> Lookup:
        """Starts a match as `lookup` does, but does not wait until P has saved the whole prompt.

        The match's `follow` names the hand-off, unless all is stored by now: give it to
        `KVPool.load(..., follow=)`. With the params of P's answer, the match comes after one call
        of the store. For a request that P and D got at once, it comes when P begins to compute.
        """
        return self._start(keys, params, follows=True)

    def note_saves(self, reasons: Iterable[Reason | None]) -> None:
        """Takes note of how saves ended (`JobResult.reason`), for P's next answers. Any thread."""
        for reason in reasons:
            if reason not in (Reason.CANCELLED, Reason.CLOSED, Reason.NOT_ADMITTED):
                self._last_save = reason and reason.value

    def is_prefill(self, params: Mapping[str, Json] | None) -> bool:
        """True if this instance is P for a request: it announces and publishes the prompt.

        params: the request's `kv_transfer_params`; they decide where PDSTORE_ROLE is `both`.
        """
        role = self._settings.role
        return role == "prefill" or (
            role == "both" and (params or {}).get("do_remote_decode") is True
        )

    def announce(
        self, keys: PromptKeys, params: Mapping[str, Json] | None = None
    ) -> tuple[HandoffId, dict[str, Json]]:
        """Returns a new hand-off for `KVPool.save`, and the `kv_transfer_params` of P's answer.

        Give the hand-off to the pool whole: it names this instance, which beats under that name as
        long as the pool saves.

        params: the request's own. A hand-off in them is taken over: a router that asks P and D at
          once has named it.
        The answer of a read-only instance (PDSTORE_PUBLISH=0) says nothing: nobody waits.
        """
        asked = Handoff.of(params)
        self._mismatches.check_roles(params, is_prefill=True)
        pool_id = self.pool_id
        last_save = self._last_save
        handoff = Handoff(
            id=HandoffId(asked.id.hex if asked else new_id(), self._instance, bool(last_save)),
            num_tokens=keys.num_tokens,
            namespace=self.namespace.hex,
            pool_id=pool_id.hex() if pool_id else None,
            fields=self.namespace.described,
            last_block=keys.hash_of(len(keys) - 1).hex() if len(keys) else None,
            last_save=last_save,
            weights_files=self._mismatches.weights_files,
        )
        return handoff.id, handoff.params() if self._settings.publish else {}

    @property
    def pool_id(self) -> bytes | None:
        """The id of the pool behind the store; None until the store has told it."""
        return self._mismatches.pool.current

    @property
    def lease_s(self) -> float:
        """Seconds that the store keeps what was matched; 0 if it does not say, or not yet."""
        return self._store.lease_s

    @property
    def problem(self) -> str | None:
        """The trouble of the store now, in a sentence; None while all is well."""
        return problem_of(self._store)

    @property
    def num_waiting(self) -> int:
        """Number of lookups that wait for the store or for markers."""
        return len(self._queue) + len(self._watch)

    def clear(self) -> bool:
        """Forgets all that the pool has of this namespace, whoever saved it. From any thread.

        Blocks for as long as the store looks through its keys. What is being saved meanwhile may
        be stored afterwards: end those jobs first.
        Returns True when it is gone; False, with a line in the log, when the store errs: some of it
        may be gone then.
        """
        try:
            self._store.clear(self.namespace.hex)
        except StoreError as error:
            log.warning("namespace %s is not cleared: %s", self.namespace.hex, error)
            return False
        log.info("cleared namespace %s of %s", self.namespace.hex, self._store.label)
        return True

    def close(self) -> None:
        """Ends the lookups, and the connections if the manager opened them. Twice is fine.

        It takes at most 2 s, whatever the store does. In the child of a fork it does nothing:
        threads and connections are the parent's.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return
        limit = Deadline(_STOP_S)
        for thread in (self._room, self._queue, self._watch, self._mismatches):
            thread.close(limit.remaining_s())
        if self._owns_store:
            self._store.close()

    def _start(
        self, keys: PromptKeys, params: Mapping[str, Json] | None, *, follows: bool
    ) -> Lookup:
        handoff = Handoff.of(params)
        self._mismatches.check_roles(params, is_prefill=False)
        wait_s = self._settings.handoff_wait_s if handoff else self._lookup_wait_s
        num_tokens, keys = keys.num_tokens, handed_over(keys, handoff)
        count = partial(self._count, keys, handoff)
        lookup = Lookup(keys, handoff, wait_s, count, follows=follows)
        refusal = self._refuse()
        if handoff is not None and not self._mismatches.fits(handoff, keys, num_tokens):
            refusal = Reason.NAMESPACE
        if refusal is not None:
            lookup.finish(Match.miss(keys, refusal))
        elif handoff is not None:
            self._watch.add(lookup)
        else:
            self._queue.add(lookup)
        return lookup

    def _refuse(self) -> Reason | None:
        """Returns why a lookup cannot be answered now: then it need not wait for its deadline."""
        if self._closed or os.getpid() != self._pid:
            return Reason.CLOSED
        is_stuck = self._queue.is_stuck or self._watch.is_stuck
        return Reason.STORE_SLOW if is_stuck else None

    def _count(self, keys: PromptKeys, handoff: Handoff | None, found: Match) -> None:
        if os.getpid() != self._pid:
            return
        self.metrics.lookup_ended(keys.num_tokens, found.num_tokens, found.reason, found.error)
        self._mismatches.check_absence(keys, handoff, found)
