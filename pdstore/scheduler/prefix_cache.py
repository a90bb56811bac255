"""PrefixCacheManager: keys, matches and hand-offs; the scheduler process's half, without tensors.

Plain lookups and hand-offs have a thread each, so that neither waits for the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pdstore.errors import StoreError
from pdstore.format.handoff import Handoff, HandoffId, new_id
from pdstore.format.keys import PromptKeys, Tokens
from pdstore.format.multimodal import MultimodalItem
from pdstore.format.namespace import FORMAT_VERSION, Json, Namespace
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.scheduler.handoff_watcher import HandoffWatcher
from pdstore.scheduler.lookup import Lookup, Match, handed_over
from pdstore.scheduler.lookup_queue import LookupQueue
from pdstore.scheduler.matching import find
from pdstore.scheduler.mismatch_log import MismatchLog
from pdstore.scheduler.pool_identity import PoolIdentity
from pdstore.scheduler.rates import CostTable
from pdstore.settings import Settings, doubts_of
from pdstore.store.base import Store
from pdstore.store.circuit_breaker import problem_of
from pdstore.store.connect import connect_store
from pdstore.store.room_watch import RoomWatch
from pdstore.threads import Deadline, Ticker

log = logging.getLogger(__name__)

_STOP_S = 1.0  # of all threads; a store's own close has the second one
_OF_ONE_PROCESS = (
    "a PDSTORE_STORE that processes share (file://, shm://, redis://): memory:// is a pool of one"
    " process alone"
)
_ONE_PLACE = "the same PDSTORE_STORE; if it is the same, {} is another place for each of them"
_DECODE_AT_PREFILL = (
    "a request with a hand-off of another instance is to be decoded here, where it is prefilled"
    " again: start the decode instance with PDSTORE_ROLE=decode, and name it as such to the router"
)
_PREFILL_AT_DECODE = (
    "a request is to be prefilled here for another instance, which PDSTORE_ROLE=decode never saves:"
    " start the prefill instance with PDSTORE_ROLE=prefill, and name it as such to the router"
)
_NOTHING = (
    "the pool has nothing of a prompt that nobody hands over: it is computed here. Look at the"
    " prefill instance (PD_TRANSFER_VIA_STORAGE=1, PDSTORE_ROLE=prefill) and at the router, which"
    " has to {}"
)
_RELAY = "relay the kv_transfer_params of its answer"
_EVICTED = (
    "P published a hand-off of which {} has not all any more: its blocks were evicted or removed"
    " since. Look at the pool's size and at its eviction policy"
)
_OTHER_TOKENS = (
    "P had {} tokens, this instance {}, not the same ones: tokenizer or chat template differ (or"
    " adapter, images, cache_salt): give both instances the same --tokenizer and --chat-template"
)
_OTHER_WEIGHTS = (
    "the weights' files of the prefill instance {} are {}, those here are {}, although"
    " PDSTORE_WEIGHTS is {} on both: if the weights differ too, answers are wrong. Give each"
    " checkpoint a PDSTORE_WEIGHTS of its own, or unset it on both: then the files decide"
)


class PrefixCacheManager:
    """Makes keys and finds out how much of a prompt the pool has.

    For one thread, the scheduler's, and for signal handlers that interrupt it.

    store: None opens PDSTORE_STORE; one that is given stays the caller's to close.
    longest_prompt: tokens of the longest prompt that the engine takes; None: not known.
    router_duty: the router's part in a hand-off, for the log of a D that finds nothing.
    weights_of: as `weights_revision`; with it D warns of an equal PDSTORE_WEIGHTS of other files.
    Raises ConfigError for a bad store URL, StoreError when the store is required and does not
    answer.
    """

    _last_save: str | None = None  # why it fell short
    _weights_files: str | None = None

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
    ) -> None:
        self.namespace = namespace
        self.metrics = metrics or Metrics()
        self._settings = settings
        self._router_duty = router_duty
        self._owns_store = store is None
        self._store = store or connect_store(settings, self.metrics)
        self.metrics.describe(FORMAT_VERSION, settings.role, namespace.hex, self._store.label)
        for doubt in doubts_of(settings, longest_prompt):
            log.warning("%s: %s", *doubt)
        self._room = RoomWatch(self._store, self.metrics)
        self._identity = PoolIdentity(self._store)
        self._instance = new_id()
        self._load_costs = CostTable()
        self._mismatches = MismatchLog()
        self._other_weights = MismatchLog(silence_s=float("inf"))  # one warning for each peer
        self._reader = self._open_reader(weights_of)
        self._closed = False
        self._pid = os.getpid()
        ask, wait_s = partial(find, self._store), settings.lookup_wait_s
        self._queue = LookupQueue(ask, wait_s)
        self._watcher = HandoffWatcher(
            self._store,
            namespace,
            self.metrics,
            self._identity,
            ask,
            patience_s=wait_s,
            on_other_pool=self._warn_of_other_pool,
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
        of the store. For a request that P and D got at once, it comes when what P still computes
        takes no longer than the load (learned from `note_load`), or as soon as P has started if
        either time is not known: earlier, engine blocks would only wait.
        """
        return self._start(keys, params, follows=True)

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """Takes note of a load's tokens, and of the time it was at work (`JobResult.busy_s`)."""
        if num_tokens > 0 and seconds > 0:
            self._load_costs.note(num_tokens, num_tokens, seconds)

    def note_saves(self, reasons: Iterable[Reason | None]) -> None:
        """Takes note of how saves ended (`JobResult.reason`), for P's next answers. Any thread."""
        for reason in reasons:
            if reason not in (Reason.CANCELLED, Reason.CLOSED):
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
        if asked is not None and asked.num_tokens is not None:
            self._mismatches.warn(_DECODE_AT_PREFILL)
        pool_id = self._identity.current
        last_save = self._last_save
        handoff = Handoff(
            id=HandoffId(asked.id.hex if asked else new_id(), self._instance, bool(last_save)),
            num_tokens=keys.num_tokens,
            namespace=self.namespace.hex,
            pool_id=pool_id.hex() if pool_id else None,
            fields=self.namespace.describe(),
            last_block=keys.hash_of(len(keys) - 1).hex() if len(keys) else None,
            last_save=last_save,
            weights_files=self._weights_files,
        )
        return handoff.id, handoff.params() if self._settings.publish else {}

    @property
    def pool_id(self) -> bytes | None:
        """The id of the pool behind the store; None until the store has told it."""
        return self._identity.current

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
        return len(self._queue) + len(self._watcher)

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
        if self._reader is not None:
            self._reader.stop(0.1)  # it may read for minutes, and holds nothing
        for thread in (self._room, self._queue, self._watcher):
            thread.close(limit.remaining_s())
        if self._owns_store:
            self._store.close()

    def _start(
        self, keys: PromptKeys, params: Mapping[str, Json] | None, *, follows: bool
    ) -> Lookup:
        handoff = Handoff.of(params)
        if self._settings.role == "decode" and (params or {}).get("do_remote_decode") is True:
            self._mismatches.warn(_PREFILL_AT_DECODE)
        wait_s = self._settings.handoff_wait_s if handoff else self._settings.lookup_wait_s
        num_tokens, keys = keys.num_tokens, handed_over(keys, handoff)
        count = partial(self._count, keys, handoff)
        load_s = self._load_s(keys.num_tokens) if follows else None
        lookup = Lookup(keys, handoff, wait_s, count, follows=follows, load_s=load_s)
        refusal = self._refuse()
        if handoff is not None and handoff.namespace not in (None, self.namespace.hex):
            self._warn_of_other_namespace(handoff)
            refusal = Reason.NAMESPACE
        elif handoff is not None:
            self._compare(handoff, keys, num_tokens)
        if refusal is not None:
            lookup.finish(Match.miss(keys, refusal))
        elif handoff is not None:
            self._watcher.add(lookup)
        else:
            self._queue.add(lookup)
        if self._closed:  # by a signal handler, perhaps since it was asked
            lookup.finish(Match.miss(keys, Reason.CLOSED))
        return lookup

    def _load_s(self, num_tokens: int) -> float | None:
        cost = self._load_costs.per_token(num_tokens)
        return None if cost is None else cost * num_tokens

    def _refuse(self) -> Reason | None:
        """Returns why a lookup cannot be answered now: then it need not wait for its deadline."""
        if self._closed or os.getpid() != self._pid:
            return Reason.CLOSED
        is_stuck = self._queue.is_stuck or self._watcher.is_stuck
        return Reason.STORE_SLOW if is_stuck else None

    def _count(self, keys: PromptKeys, handoff: Handoff | None, found: Match) -> None:
        if os.getpid() != self._pid:
            return
        self.metrics.lookup_ended(keys.num_tokens, found.num_tokens, found.reason, found.error)
        if found.reason is Reason.ABSENT:
            self._warn_of_absence(keys, handoff, found)

    def _warn_of_absence(self, keys: PromptKeys, handoff: Handoff | None, found: Match) -> None:
        """Warns of a prompt that should be in the pool; an ordinary one need not be."""
        if handoff is not None and handoff.num_tokens is not None and handoff.is_of(keys):
            self._mismatches.warn(_EVICTED.format(self._store.label))
        elif handoff is None and self._settings.role == "decode" and not found.num_tokens:
            self._mismatches.warn(_NOTHING.format(self._router_duty))

    def _compare(self, handoff: Handoff, keys: PromptKeys, num_tokens: int) -> None:
        """Warns of another prompt, of `num_tokens` before it was cut to P's, or other weights."""
        if not handoff.is_of(keys):
            message = _OTHER_TOKENS.format(handoff.num_tokens, num_tokens)
            self._mismatches.warn(message, about=_OTHER_TOKENS)
        theirs, ours = handoff.weights_files, self._weights_files
        if theirs and ours and theirs != ours and theirs[:6] == ours[:6]:  # else one is a commit
            peer, named = handoff.id.instance or "", self._settings.weights
            message = _OTHER_WEIGHTS.format(peer[:8], theirs, ours, named)
            self._other_weights.warn(message, about=peer)

    def _open_reader(self, weights_of: Callable[[Settings], str] | None) -> Ticker | None:
        if not self._settings.weights or weights_of is None:
            return None

        def read() -> None:
            with contextlib.suppress(ValueError, OSError):  # no files here: nothing to compare
                parts = weights_of(self._settings.model_copy(update={"weights": None})).split("+")
                self._weights_files = "+".join(part[:24] for part in parts)

        return Ticker("pdstore-weights", read)

    def _warn_of_other_pool(self, handoff: Handoff) -> None:
        ours, label = self._identity.current or b"", self._store.label
        remedy = _OF_ONE_PROCESS if label.startswith("memory://") else _ONE_PLACE.format(label)
        self._mismatches.warn(
            f"the prefill instance's pool is {(handoff.pool_id or '')[:8]}, this one's is"
            f" {ours.hex()[:8]} at {label}: give both {remedy}"
        )

    def _warn_of_other_namespace(self, handoff: Handoff) -> None:
        differences = self.namespace.differences(handoff.fields)
        self._mismatches.warn(
            f"the prefill instance's KV does not fit this one: {'; '.join(differences)}:"
            " start P and D with the same"
        )
