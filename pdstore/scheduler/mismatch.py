"""Mismatches: notices that another instance does not fit this one, and logs warnings."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from pdstore.errors import ConfigError, Reason, StoreError
from pdstore.format.handoff import Handoff, TransferParams
from pdstore.format.keys import Namespace, PromptKeys
from pdstore.scheduler.lookup import Match
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.connect import place_of, read_pool_id
from pdstore.store.optional import num_evicted
from pdstore.store.url import Place, Reach, urls_in
from pdstore.threads import Deadline, Ticker, call_or

log = logging.getLogger(__name__)

_MAX_MESSAGES = 64
_OF_ONE_PROCESS = (
    "a PDSTORE_STORE that processes share (file://, shm://, redis://): memory:// is a pool of one"
    " process alone"
)
_ONE_PLACE = (
    "the same PDSTORE_STORE; if it is the same, {} is another place for each of them (another"
    " host's, another container's, or a Service with two servers behind it)"
)
_OF_ONE_USER = (
    "the same PDSTORE_STORE, and run them as one user on one host with one /dev/shm (containers:"
    " ipc: host): this instance's pool is {}, and P's log names its own. If they are the same file,"
    " restart the instance whose log says that it was removed"
)
_DECODE_AT_PREFILL = (
    "a request with a hand-off of another instance is to be decoded here, where it is prefilled"
    " again: start the decode instance with PDSTORE_ROLE=decode, and name it as such to the router"
)
_PREFILL_AT_DECODE = (
    "a request is to be prefilled here for another instance, which PDSTORE_ROLE=decode never saves:"
    " start the prefill instance with PDSTORE_ROLE=prefill, and name it as such to the router"
)
_NOTHING = (
    "the pool has nothing of a prompt that nobody hands over: it is computed here. The router's log"
    " says so if the prefill instance failed, or answered without kv_transfer_params (then look at"
    " PD_TRANSFER_VIA_STORAGE=1 and PDSTORE_ROLE=prefill there); if it says nothing, {}"
)
_RELAY = (
    "the router, or a gateway between it and this instance, removes kv_transfer_params: it has to"
    " relay them"
)
_NOTHING_ELSEWHERE = (
    "the pool has nothing of a prompt that nobody hands over: it is computed here. Look at the"
    " prefill instance (PD_TRANSFER_VIA_STORAGE=1, PDSTORE_ROLE=prefill) and at the router, which"
    " has to {}"
)
_NO_HANDOFFS = (
    "requests come here without kv_transfer_params, although PDSTORE_ROLE is decode: what the pool"
    " has of their prompts is loaded, but this instance does not wait for what the prefill instance"
    " still saves. The router's log says so if the prefill instance failed or answered without this"
    " field; if it says nothing, a gateway between the router and this instance removes the field:"
    " it has to relay it"
)
_HOUR_S = 3600.0
_GONE = "P published a hand-off of which {} has not all any more: its blocks "
_EVICTED = (
    f"{_GONE}were evicted or removed since. Look at the pool's size and at its eviction policy"
)
_EXPIRED = (
    f"{_GONE}have expired, because nothing used them for PDSTORE_BLOCK_TTL_S (here {{}} s; P's"
    " counts for what P saves): set more than the longest time from P's answer to D's look,"
    " the same for P and D, or leave it unset"
)
_EVICTED_OR_EXPIRED = (
    f"{_GONE}were evicted, or have expired after PDSTORE_BLOCK_TTL_S={{}} seconds. Set more than"
    " the longest time from P's answer to D's look, or leave it unset; and look at the pool's size"
    " and at its eviction policy"
)
_OTHER_TOKENS = (
    "P had {} tokens, this instance {}, not the same ones: tokenizer or chat template differ (or"
    " adapter, images, cache_salt; or another prompt of the same request): give both instances"
    " the same --tokenizer and --chat-template"
)
_OTHER_UPDATE = (
    "weights updated in place: the prefill instance's are {}, this one's are {}, so its KV does not"
    " fit here: update both alike, with equal numbers of ranks, or restart both"
)
_OTHER_WEIGHTS = (
    "the weights' files of the prefill instance {} are {}, those here are {}, although"
    " PDSTORE_WEIGHTS is {} on both: if the weights differ too, answers are wrong. Give each"
    " checkpoint a PDSTORE_WEIGHTS of its own, or unset it on both: then the files decide"
)


class MismatchLog:
    """Logs a message again only after `repeat_interval_s`, and few different ones in `interval_s`.

    What other instances send is in the messages, so that their number has to be limited: at most
    `max_lines` of them are logged in `interval_s` seconds. What is left out counts as not logged.
    """

    def __init__(
        self, repeat_interval_s: float = 600.0, interval_s: float = 1.0, max_lines: int = 8
    ) -> None:
        self._repeat_interval_s = repeat_interval_s
        self._interval_s = interval_s
        self._max_lines = max_lines
        self._silent_until: OrderedDict[str, Deadline] = OrderedDict()
        self._interval_end = Deadline(0.0)
        self._num_left = 0

    def warn(self, message: str, about: str | None = None) -> None:
        """Logs a message unless it is too soon. Messages with equal `about` count as the same."""
        last = self._silent_until.get(about or message)
        if last is not None and not last.is_over():
            return
        if self._interval_end.is_over():
            self._interval_end = Deadline(self._interval_s)
            self._num_left = self._max_lines
        if not self._num_left:
            return
        self._num_left -= 1
        self._silent_until[about or message] = Deadline(self._repeat_interval_s)
        while len(self._silent_until) > _MAX_MESSAGES:
            self._silent_until.popitem(last=False)
        log.warning(message)


class PoolIdentity:
    """Keeps the id of the pool behind a store, and asks for it again every `age_s` seconds.

    A store that is restarted empty is another pool with a new id. Other instances may notice this
    later than this instance, or may notice a restart that this instance missed. So for twice
    `age_s` after the id has changed, every other instance counts as using the same pool.
    Any thread may call it.
    """

    def __init__(self, store: Store, age_s: float = 10.0) -> None:
        self._store = store
        self._age_s = age_s
        self.current: bytes | None = None
        self._change_deadline = Deadline(0.0)
        self._deadline = Deadline(0.0)

    def refresh(self) -> float:
        """Asks the store for the id if the last answer is `age_s` old; keeps the id if that fails.

        Returns the seconds until the store has to be asked again.
        """
        if self._deadline.is_over():
            self._ask()
        return self._deadline.remaining_s()

    def is_same(self, pool_id: str | None) -> bool:
        """Returns False if an instance with this `pool_id` surely uses another pool, else True.

        Asks the store for its id again before it returns False. Returns True if there is no answer.
        """
        return self._may_be(pool_id) or not self._ask() or self._may_be(pool_id)

    def _may_be(self, pool_id: str | None) -> bool:
        is_open = pool_id is None or self.current is None or not self._change_deadline.is_over()
        return is_open or pool_id == (self.current or b"").hex()

    def _ask(self) -> bool:
        """Asks the store for its id. If there is no answer, returns False and keeps the old id."""
        self._deadline = Deadline(self._age_s)
        pool_id = call_or(self._read, None)
        if pool_id is None:
            return False
        if pool_id != self.current:
            self._change_deadline = Deadline(0.0 if self.current is None else 2 * self._age_s)
            self.current = pool_id
        return True

    def _read(self) -> bytes | None:
        try:
            return read_pool_id(self._store)
        except StoreError:  # other calls of the store report its errors
            return None


class Mismatches:
    """Compares this instance with those that hand prompts over to it; warns of differences.

    pool: the id of the pool behind the store.
    weights_files: a digest of the weights' files; None until a thread has read the files, and for
      ever if there is nothing to compare.
    weights_update: a digest of the weights if they were written in place, else empty.
    router_duty, weights_of: as `PrefixCacheManager` takes them.
    Any thread may call it.
    """

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        store: Store,
        *,
        router_duty: str | None,
        weights_of: Callable[[Settings], str] | None,
    ) -> None:
        self.pool = PoolIdentity(store)
        self._store = store
        self._has_unexplained = False  # absent blocks, of a store in which blocks expire
        self.weights_files: str | None = None
        self.weights_update = b""
        self._settings = settings
        self._namespace = namespace
        self._label = store.label
        self._router_duty = router_duty
        self._log = MismatchLog()
        self._no_handoffs = MismatchLog(repeat_interval_s=_HOUR_S)
        self._hour_with_handoffs = Deadline(0.0)  # an hour from the last one on
        self._other_weights = MismatchLog(
            repeat_interval_s=float("inf")
        )  # one warning for each peer
        self._reader: Ticker | None = None
        self._pool_thread = Ticker("pdstore-pool-id", self._look)
        if settings.weights and weights_of is not None:
            self._weights_of = weights_of
            self._reader = Ticker("pdstore-weights", self._read_weights)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads."""
        if self._reader is not None:
            self._reader.stop(0.1)  # the thread may read files for minutes; it holds no lock
        self._pool_thread.stop(timeout_s)

    def check_roles(self, asked: TransferParams, *, is_prefill: bool) -> None:
        """Logs a warning about a request that came to the wrong instance.

        is_prefill: True if this instance prefills the request for another instance; False if this
          instance looks up the request's prompt.
        """
        handoff = asked.handoff if is_prefill else None
        if handoff is not None and handoff.num_tokens is not None:
            self._log.warn(_DECODE_AT_PREFILL)
        if not is_prefill and self._settings.role == "decode" and asked.asks_prefill:
            self._log.warn(_PREFILL_AT_DECODE)

    def fits(self, handoff: Handoff, keys: PromptKeys, num_tokens: int) -> bool:
        """Returns whether P's KV can be used here. Warns if it cannot, and if it may be wrong KV.

        keys: the keys of this instance's prompt, cut where P's prompt ends.
        num_tokens: the tokens of this instance's prompt before it was cut.
        """
        if handoff.namespace not in (None, self._namespace.hex):
            differences = self._namespace.differences(handoff.fields)
            self._log.warn(
                f"the prefill instance's KV does not fit this one: {'; '.join(differences)}:"
                " start P and D with the same"
            )
            return False
        if handoff.namespace and (handoff.weights_update or "") != self.weights_update.hex():
            both = map(_updated, (handoff.weights_update, self.weights_update.hex()))
            self._log.warn(_OTHER_UPDATE.format(*both), about=_OTHER_UPDATE)
            return False
        if not handoff.is_of(keys):
            message = _OTHER_TOKENS.format(handoff.num_tokens, num_tokens)
            self._log.warn(message, about=_OTHER_TOKENS)
        theirs = handoff.weights_files
        ours = self.weights_files
        if theirs and ours and theirs != ours and theirs[:6] == ours[:6]:  # else one is a commit
            peer = handoff.id.instance or ""
            named = self._settings.weights
            message = _OTHER_WEIGHTS.format(peer[:8], theirs, ours, named)
            self._other_weights.warn(message, about=peer)
        return True

    def is_elsewhere(self, handoff: Handoff) -> bool:
        """Returns whether P uses another pool; warns if it does. May ask the store."""
        if self.pool.is_same(handoff.pool_id):
            return False
        ours = self.pool.current or b""
        label = self._label
        remedy = _remedy_for(label, self._settings)
        self._log.warn(
            f"the prefill instance's pool is {(handoff.pool_id or '')[:8]}, this one's is"
            f" {ours.hex()[:8]} at {label}: give both {remedy}"
        )
        return True

    def check_absence(self, keys: PromptKeys, handoff: Handoff | None, found: Match) -> None:
        """Warns if blocks that P published are gone, or if D has no hand-off and finds nothing.

        Also warns if D finds blocks without a hand-off and no request had a hand-off for an hour:
        a single request may have none, but a router gives D one with each prompt that P has saved.
        """
        if handoff is not None:
            self._hour_with_handoffs = Deadline(_HOUR_S)
        elif found.num_tokens and self._is_owed_handoffs():
            self._no_handoffs.warn(_NO_HANDOFFS)
        if found.reason is not Reason.ABSENT:
            return
        if handoff is not None and handoff.num_tokens is not None and handoff.is_of(keys):
            self._has_unexplained = True
            self._pool_thread.wake()  # the store is asked on that thread
        elif handoff is None and self._settings.role == "decode" and not found.num_tokens:
            duty = self._router_duty
            message = _NOTHING.format(_RELAY) if duty is None else _NOTHING_ELSEWHERE.format(duty)
            self._log.warn(message)

    def _is_owed_handoffs(self) -> bool:
        """Returns whether requests should have hand-offs, and none has had one for an hour."""
        is_decode = self._settings.role == "decode" and self._router_duty is None
        return is_decode and self._hour_with_handoffs.is_over()

    def _look(self) -> float:
        if self._has_unexplained:
            self._has_unexplained = False
            self._explain_absence()
        return self.pool.refresh()

    def _explain_absence(self) -> None:
        """Warns that blocks are gone. If they expire, tells that apart from their eviction."""
        ttl_s = self._settings.block_ttl_s
        message = _EVICTED
        if self._store.expires_blocks:
            count = call_or(partial(num_evicted, self._store), None)
            if count == 0:
                message = _EXPIRED
            elif ttl_s < self._settings.handoff_ttl_s:  # a marker that D saw is no older than that
                message = _EVICTED_OR_EXPIRED
        self._log.warn(message.format(self._label, ttl_s), about=_GONE)

    def _read_weights(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # no files here: nothing to compare
            by_files = self._settings.model_copy(update={"weights": None})
            parts = self._weights_of(by_files).split("+")
            self.weights_files = "+".join(part[:24] for part in parts)


def _remedy_for(label: str, settings: Settings) -> str:
    """Returns what to do if P has another pool than this instance, whose store has this label."""
    place = Place()
    with contextlib.suppress(ConfigError):
        url, *_ = urls_in(settings.store)  # of several tiers, P and D meet in the first
        first, *_ = urls_in(label)
        place = place_of(url if url.startswith(first) else first, settings)
    if place.reach is Reach.PROCESS:
        return _OF_ONE_PROCESS
    if place.reach is Reach.HOST:
        return _OF_ONE_USER.format(place.path)
    return _ONE_PLACE.format(label)


def _updated(digest: str | None) -> str:
    return f"updated to {digest[:8]}" if digest else "those of its start"
