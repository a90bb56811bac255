"""PrefixCacheManager: keys, matches and hand-offs, in the scheduler process, without tensors.

One thread answers lookups that have a hand-off. Another thread answers lookups that have none. So
neither kind waits for the other kind. A third thread renews the answers of requests that wait.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial

from pdstore.errors import Cause, Reason, Severity, StoreError
from pdstore.format.handoff import Handoff, HandoffId, TransferParams, new_id
from pdstore.format.keys import FORMAT_VERSION, Json, MultimodalItem, Namespace, PromptKeys, Tokens
from pdstore.metrics import Metrics, TierState
from pdstore.scheduler.handoff_watch import HandoffWatch
from pdstore.scheduler.lookup import (
    Lookup,
    LookupQueue,
    Match,
    find,
    handed_over,
    without_last,
)
from pdstore.scheduler.mismatch import Mismatches
from pdstore.scheduler.renewal import Renewals, store_for_renewals
from pdstore.settings import LOOKUP_TIMEOUT_S, Settings, setting_warnings
from pdstore.store.base import Store
from pdstore.store.connect import RoomWatch, connect_store
from pdstore.store.guard import guard_of, problem_of
from pdstore.store.optional import TellsRemovals, tier_names, tier_states_of
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 1.0  # seconds to stop all threads; then the store has another second to close
CLAIM_TIMEOUT_S = 1.0  # a block whose save takes longer may be saved by another request as well


class PrefixCacheManager:
    """Makes the keys of a prompt and finds out how much of the prompt the pool has.

    Only the scheduler's thread may call it. A signal handler must not, because it takes locks.

    store: a store, which the caller has to close; None to open PDSTORE_STORE.
    longest_prompt: the maximum number of tokens of a prompt in the engine; None if not known.
    router_duty: what the router has to do, for an engine whose requests have no
      `kv_transfer_params`; D logs it when it finds nothing. None: they have them, and the router
      has to relay those of P's answer.
    lookup_timeout_s: of the wait for the store's answer, for a lookup without a hand-off.
    weights_of: returns the weights' revision for settings; D warns if P's weight files differ.
    Raises ConfigError for a bad store URL, StoreError if a required store does not answer.
    """

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        *,
        metrics: Metrics | None = None,
        store: Store | None = None,
        longest_prompt: int | None = None,
        router_duty: str | None = None,
        weights_of: Callable[[Settings], str] | None = None,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> None:
        self.namespace = namespace
        self.metrics = metrics or Metrics()
        self._settings = settings
        self._owns_store = store is None
        self._store = store or connect_store(settings, self.metrics)
        self._room = RoomWatch(self._store, self.metrics)
        self._instance = new_id()
        self._last_save: str | None = None  # why it did not store everything; None if it did
        self._mismatches = Mismatches(
            settings, namespace, self._store, router_duty=router_duty, weights_of=weights_of
        )
        self._introduce(longest_prompt)
        self._claims: dict[bytes, float] = {}  # by a block's hash: when its save began
        self._closed = False
        self._pid = os.getpid()
        self._lookup_timeout_s = lookup_timeout_s
        ask = partial(find, self._store)
        self._queue = LookupQueue(ask, lookup_timeout_s)
        again = store_for_renewals(self._store)
        self._renewals = Renewals(again, partial(find, again), lambda: self._queue.is_busy)
        self._watch = HandoffWatch(
            self._store,
            namespace,
            self.metrics,
            ask,
            call_timeout_s=lookup_timeout_s,
            is_elsewhere=self._mismatches.is_elsewhere,
        )

    def _introduce(self, longest_prompt: int | None) -> None:
        """Tells the metrics who this instance is, and the log which settings may be wrong."""
        role = self._settings.role
        label = self._store.label
        namespace = self.namespace.hex
        self.metrics.set_info(FORMAT_VERSION, role, namespace, label, lambda: self.pool_id)
        for warning in setting_warnings(self._settings, longest_prompt):
            log.warning("%s: %s", *warning)

    def keys(
        self,
        token_ids: Tokens,
        *,
        lora: bytes = b"",
        cache_salt: bytes = b"",
        items: Sequence[MultimodalItem] = (),
    ) -> PromptKeys:
        """Returns the names of a prompt's blocks.

        token_ids: the token ids of the prompt, each in [0, 2**31).
        lora, cache_salt, items: as `PromptKeys` takes them.
        Raises ValueError for a token id outside this range.
        """
        keys = PromptKeys(
            self.namespace,
            lora=lora,
            cache_salt=cache_salt,
            items=items,
            weights=self._mismatches.weights_update,
        )
        return keys.extend(token_ids)

    def use_weights(self, digest: bytes) -> None:
        """Makes all later keys and hand-offs name weights that were written in place.

        digest: of the weights, 16 bytes; empty for the weights that the namespace names.
        """
        self._mismatches.weights_update = digest

    def claim(self, keys: PromptKeys, first_block: int, state_ends: Collection[int] = ()) -> int:
        """Returns the first block, from `first_block` on, that no save of the last second has.

        The caller saves it and all after it. Else prompts that come together would each copy the
        new prefix that they share.

        state_ends: after how many tokens the save has a state. It is claimed apart from its block,
          which another prompt's save may have without a state.
        """
        now = time.monotonic()
        claims = self._claims
        while claims and now - claims[oldest := next(iter(claims))] > CLAIM_TIMEOUT_S:
            del claims[oldest]

        def is_new(name: bytes) -> bool:
            return now - claims.get(name, 0.0) > CLAIM_TIMEOUT_S

        blocks = enumerate(keys.hashes(first_block), first_block)
        first = next((number for number, name in blocks if is_new(name)), len(keys))
        continuation = keys.namespace.continuation
        for end in state_ends:
            name = keys.hash_of((end - 1) // keys.block_tokens) + b"state"
            if is_new(name):  # it is of no use without the windows before it
                needed = [continuation.blocks(group, end).start for group in continuation.needs]
                first = min(first, max(first_block, min(needed)))
                claims[name] = now
        claims.update(dict.fromkeys(keys.hashes(first), now))
        return first

    def match(self, keys: PromptKeys) -> Match:
        """Returns which leading blocks of the prompt the pool has now; none if the store fails.

        The caller waits for the store, even if the store hangs; `lookup` does not wait.
        """
        refusal = self._refuse()
        found = Match.miss(keys, refusal) if refusal else find(self._store, keys)
        self._count(keys, None, found)
        return found

    def lookup(
        self,
        keys: PromptKeys,
        params: Mapping[str, Json] | TransferParams | None = None,
        *,
        is_held: bool = False,
    ) -> Lookup:
        """Starts a match and returns at once.

        If `params` have a hand-off, the match waits for P's markers, up to a deadline. If P's
        prompt ends within the last block of `keys`, P's prompt is matched instead of `keys`.

        params: the request's `kv_transfer_params`, parsed or not. If they are None or have no entry
          "pdstore", the match waits for no marker.
        is_held: True to renew the answer until `Lookup.serve` or `Lookup.cancel`, because a request
          waits with it in the engine's queue.
        Raises ValueError for a malformed hand-off.
        """
        return self._start(keys, params, follows=False, is_held=is_held)

    def follow(
        self,
        keys: PromptKeys,
        params: Mapping[str, Json] | TransferParams | None = None,
        *,
        is_held: bool = False,
    ) -> Lookup:
        """Starts a match as `lookup` does, but does not wait until P has saved the whole prompt.

        If P still saves the prompt, the match's `follow` is the hand-off's id, an argument for
        `KVPool.load(..., follow=)`. With the `kv_transfer_params` of P's answer, the match comes
        after one call of the store. If the router sent the request to P and D at the same time, the
        match comes when P has stored the marker `started`.
        """
        return self._start(keys, params, follows=True, is_held=is_held)

    def look_again(self, lookup: Lookup) -> Lookup:
        """Starts a lookup for a request that was served and waits anew; it is held.

        It waits for no marker. Metrics count it and the first lookup as one.
        """
        again = Lookup(
            lookup.keys,
            None,
            self._lookup_timeout_s,
            lambda _: None,
            num_tokens=lookup.num_tokens,
            hold=self._renewals.add,
        )
        again.started_at = lookup.started_at
        if (refusal := self._refuse()) is not None:
            again.finish(Match.miss(lookup.keys, refusal))
        else:
            self._queue.add(again)
        return again

    def note_saves(self, reasons: Iterable[Reason | None]) -> None:
        """Records how saves ended (`JobResult.reason`), for P's next answers. For any thread."""
        for reason in reasons:
            self.note_job(reason)
            if reason is None:
                self._last_save = None
            elif reason.cause is not Cause.ENDED and reason.severity is not Severity.ORDINARY:
                self._last_save = reason.value

    def note_job(self, reason: Reason | None) -> None:
        """Records how a load or a save ended (`JobResult.reason`). Any thread may call it.

        After a job for which the store was too slow, this half probes the store as well, so that
        the next lookup does not wait in its turn for a store that hangs.
        """
        guard = guard_of(self._store)
        if reason is not None and reason.cause is Cause.SLOW and guard is not None:
            guard.doubt()

    def note_load(self, num_tokens: int, num_cold: int, by_tier: Mapping[int, int]) -> None:
        """Counts the tokens that a load has brought.

        num_cold: those of them without the drafts' KV.
        by_tier: by the number of the tier that they were read from; empty without tiers.
        """
        self.metrics.tokens.labels("cold").inc(num_cold)
        self.metrics.tokens.labels("loaded").inc(num_tokens)
        for name, count in self.named_tiers(by_tier).items():
            self.metrics.tier_tokens.labels(name).inc(count)

    def named_tiers(self, by_tier: Mapping[int, int]) -> dict[str, int]:
        """Returns numbers of tokens by the names of their tiers, the fastest tier first."""
        names = dict(enumerate(self.tier_names))
        return {names.get(tier, str(tier)): count for tier, count in sorted(by_tier.items())}

    def is_prefill(self, params: Mapping[str, Json] | TransferParams | None) -> bool:
        """Returns whether this instance is P for a request: whether it has to hand the prompt off.

        params: the request's `kv_transfer_params`; they decide if PDSTORE_ROLE is `both`.
        """
        role = self._settings.role
        return role == "prefill" or (role == "both" and TransferParams.parse(params).asks_prefill)

    def announce(
        self, keys: PromptKeys, params: Mapping[str, Json] | TransferParams | None = None
    ) -> tuple[HandoffId, dict[str, Json]]:
        """Returns a new hand-off for `KVPool.save`, and the `kv_transfer_params` of P's answer.

        Give the returned HandoffId to `KVPool.save` unchanged: it has the id of this instance,
        under which the pool stores beats while it saves.

        params: the request's `kv_transfer_params`. If they already hold a hand-off id, that id is
          used instead of a new one: a router that asks P and D at the same time has chosen it.
        With PDSTORE_PUBLISH=0 the returned params are empty, because nothing will be stored.
        """
        given = TransferParams.parse(params)
        asked = given.handoff
        self._mismatches.check_roles(given, is_prefill=True)
        pool_id = self.pool_id
        last_save = self._last_save or self._trouble()
        handoff = Handoff(
            id=HandoffId(asked.id.hex if asked else new_id(), self._instance, bool(last_save)),
            num_tokens=keys.num_tokens,
            namespace=self.namespace.hex,
            pool_id=pool_id.hex() if pool_id else None,
            fields=self.namespace.described,
            last_block=keys.hash_of(len(keys) - 1).hex() if len(keys) else None,
            last_save=last_save,
            weights_files=self._mismatches.weights_files,
            weights_update=self._mismatches.weights_update.hex() or None,
            is_exact=self.namespace.continuation.is_exact,
        )
        return handoff.id, handoff.params() if self._settings.publish else {}

    @cached_property
    def tier_names(self) -> Sequence[str]:
        """Names of the store's tiers, the fastest first; none if it has no tiers."""
        return tier_names(self._store)

    @property
    def pool_id(self) -> bytes | None:
        """The id of the pool behind the store; None until the store has answered once."""
        return self._mismatches.pool.current

    @property
    def removals(self) -> TellsRemovals | None:
        """The store, if it can tell which blocks of the pool are gone; else None."""
        return self._store.optional(TellsRemovals)

    @property
    def lease_s(self) -> float:
        """Seconds for which the store keeps a matched value; 0 if it has not told (yet)."""
        return self._store.lease_s

    @property
    def problem(self) -> str | None:
        """A sentence about the store's present trouble; None if there is none."""
        return problem_of(self._store)

    @property
    def tiers(self) -> Sequence[TierState]:
        """The state of each tier of the store, the fastest first; empty for a pool of one store."""
        return tier_states_of(self._store)

    def clear(self) -> bool:
        """Forgets all values of this namespace, also those of other instances.

        Any thread may call it. The caller waits while the store searches all its keys. A save that
        runs meanwhile may still store values, so end running saves first.
        Returns True if all values are gone. If the store fails, logs a warning and returns False;
        some of the values may be gone then.
        """
        try:
            self._store.clear(self.namespace.hex)
        except StoreError as error:
            log.warning("namespace %s is not cleared: %s", self.namespace.hex, error)
            return False
        self._claims = {}
        log.info("cleared namespace %s of %s", self.namespace.hex, self._store.label)
        return True

    def close(self) -> None:
        """Ends the lookups, and closes the store if the manager opened it. May be called again.

        It takes at most 2 s (Mooncake: 3), even if the store hangs. In the child of a fork it does
        nothing, because threads and connections belong to the parent.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return
        deadline = Deadline(_STOP_TIMEOUT_S)
        for thread in (self._room, self._renewals, self._queue, self._watch, self._mismatches):
            thread.close(deadline.remaining_s())
        if self._owns_store:
            self._store.close()

    def _start(
        self,
        keys: PromptKeys,
        params: Mapping[str, Json] | TransferParams | None,
        *,
        follows: bool,
        is_held: bool,
    ) -> Lookup:
        given = TransferParams.parse(params)
        handoff = given.handoff
        self._mismatches.check_roles(given, is_prefill=False)
        timeout_s = self._settings.handoff_wait_s if handoff else self._lookup_timeout_s
        num_tokens, keys = keys.num_tokens, handed_over(keys, handoff)
        is_fit = handoff is None or self._mismatches.fits(handoff, keys, num_tokens)
        if self.namespace.continuation.is_exact:
            keys = without_last(keys, num_tokens)
            # where P's prompt ends elsewhere, only what is stored tells where the last state is
            follows &= handoff is None or handoff.num_tokens in (None, keys.num_tokens)
        count = partial(self._count, keys, handoff)
        lookup = Lookup(
            keys,
            handoff,
            timeout_s,
            count,
            follows=follows,
            num_tokens=num_tokens,
            hangs=self._hangs(handoff),
            hold=self._renewals.add if is_held else None,
        )
        refusal = self._refuse() if is_fit else Reason.NAMESPACE
        if refusal is not None:
            lookup.finish(Match.miss(keys, refusal))
        elif not keys.num_tokens:
            lookup.finish(Match(keys, 0, None))  # the engine computes all of it in any case
        elif handoff is not None:
            self._watch.add(lookup)
        else:
            self._queue.add(lookup)
        return lookup

    def _hangs(self, handoff: Handoff | None) -> Callable[[], bool]:
        """Returns a function that tells whether the store hangs for a lookup of this hand-off."""
        if handoff is None:
            return lambda: False  # its own timeout is as short
        return partial(self._watch.hangs, handoff)

    def _refuse(self) -> Reason | None:
        """Returns the reason with which new lookups must end at once; None if they can be asked."""
        if self._closed or os.getpid() != self._pid:
            return Reason.CLOSED
        is_stuck = self._queue.is_stuck or self._watch.is_stuck
        return Reason.STORE_SLOW if is_stuck else None

    def _trouble(self) -> str | None:
        """Returns why the next save will probably fail: the store does not answer now."""
        if self._refuse() is Reason.STORE_SLOW:
            return Reason.STORE_SLOW.value
        guard = guard_of(self._store)
        return Reason.STORE_DOWN.value if guard is not None and guard.is_open else None

    def _count(self, keys: PromptKeys, handoff: Handoff | None, found: Match) -> None:
        if os.getpid() != self._pid:
            return
        self.metrics.lookup_ended(keys.num_tokens, found.num_tokens, found.reason, found.error)
        self._mismatches.check_absence(keys, handoff, found)
