"""PDStoreConnectorScheduler: what the connector does in vLLM's scheduler, on PrefixCacheManager.

Nothing here waits for the store: lookups are started and asked about in a later step, and what is
to be moved goes to the workers as orders.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from pdstore.adapters.vllm.block_refs import BlockRefs
from pdstore.adapters.vllm.block_tables import NULL_BLOCK, Tables, as_pdstores
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    Registered,
    SaveSpec,
    StepReport,
)
from pdstore.adapters.vllm.request import RequestTracker, is_keyed, is_prefill_of, keys_of
from pdstore.errors import ConfigError
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Json
from pdstore.metrics import Metrics
from pdstore.scheduler.lookup import Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings

log = logging.getLogger("vllm.pdstore")

_IDLE_S = 0.0005  # vLLM steps as fast as it can while all it has to do is to wait for us


class PDStoreConnectorScheduler:
    """Follows requests: what to look up, to load, to save, to hand over. One thread calls it.

    It begins with the first worker's word on the KV cache's real layout; before, nothing is found
    and nothing saved.
    """

    def __init__(self, settings: Settings, num_ranks: int, metrics: Metrics) -> None:
        self._settings = settings
        self._num_ranks = num_ranks
        self._metrics = metrics
        self._cache: PrefixCacheManager | None = None
        self._refs: BlockRefs | None = None
        self._tables = Tables()
        self._block_tokens = 0  # of vLLM's blocks
        self._requests: dict[str, RequestTracker] = {}
        self._loads: list[LoadSpec] = []
        self._aborted_handoffs: list[HandoffId] = []
        self._numbers = itertools.count()

    def begin(self, ranks: Sequence[Registered]) -> None:
        """All workers have been given their KV cache. Raises ConfigError if theirs differ."""
        if not ranks:
            raise ConfigError(
                "no worker's word came: in MultiConnector list PDStoreConnector first"
            )
        namespaces = [rank.namespace for rank in ranks]
        for other in namespaces[1:]:
            if other.digest != namespaces[0].digest:
                differences = "; ".join(namespaces[0].differences(other.describe()))
                raise ConfigError(f"the ranks of this instance differ in {differences}")
        self._block_tokens = ranks[0].block_tokens
        self._cache = PrefixCacheManager(self._settings, namespaces[0], metrics=self._metrics)
        log.info(
            "pdstore: role %s, namespace %s, blocks of %d tokens",
            self._settings.role,
            namespaces[0].hex,
            namespaces[0].block_tokens,
        )

    def bind(self, block_pool: Any) -> None:
        """vLLM's pool of blocks: saves hold theirs there."""
        self._refs = BlockRefs(block_pool, self._num_ranks)

    def add(self, request: Any) -> RequestTracker | None:
        """A new request: starts its lookup. None for one that the pool has no name for."""
        followed = self._requests.get(request.request_id)
        if followed is not None or self._cache is None:
            return followed
        if not is_keyed(request, has_pages=self._cache.namespace.fields["page"] is not None):
            return None
        keys = keys_of(request, self._cache)
        if keys is None:
            return None
        followed = RequestTracker(request, keys)
        self._requests[request.request_id] = followed
        params = request.kv_transfer_params
        is_prefill = is_prefill_of(request, self._settings)
        if is_prefill:
            followed.attempt, followed.answer = self._cache.announce(followed.keys, params)
        if not getattr(request, "skip_reading_prefix_cache", False):
            followed.lookup = self._cache.lookup(followed.keys, None if is_prefill else params)
        return followed

    def num_found(self, request: Any, num_computed: int) -> int | None:
        """Tokens behind the first `num_computed` that can be loaded; None: not known yet."""
        followed = self.add(request)
        if followed is None or followed.lookup is None:
            return 0
        found = followed.lookup.poll()
        if found is None:
            return None
        followed.num_computed = num_computed
        if num_computed >= request.num_tokens - 1:
            return 0  # vLLM computes the last token anyway; a prompt of one it would ask for again
        return max(0, _usable(found, request) - num_computed)

    def load(self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """The blocks are there for what `num_found` promised: orders the load."""
        followed = self._requests[request.request_id]
        found = followed.lookup.poll() if followed.lookup else None
        assert found is not None
        first, keys = followed.num_computed, found.keys
        end = first + num_external  # vLLM may take less than it was told
        if end < _usable(found, request) or self._blocks_of(keys.num_tokens) > len(block_ids[0]):
            keys = keys.prefix(end)
        tables = as_pdstores(block_ids, self._blocks_of(keys.num_tokens))
        followed.num_loading = keys.num_tokens
        self._loads.append(LoadSpec(request.request_id, keys, tables, first, end))

    def give_up(self, request_id: str) -> None:
        """Something failed for this request: nothing is loaded for it any more."""
        followed = self._requests.get(request_id)
        if followed is not None:
            followed.lookup, followed.num_loading = None, 0

    def fail_load(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Orders a load that brings nothing: vLLM waits for the word that it has ended."""
        self.give_up(request_id)
        tables = as_pdstores(block_ids, len(block_ids[0]))
        end = len(block_ids[0]) * self._block_tokens
        first = end - self._blocks_of(num_external) * self._block_tokens
        self._loads.append(LoadSpec(request_id, None, tables, first, end))

    def take_orders(self) -> PDStoreConnectorMetadata:
        """What the workers do beside this step, but for its saves."""
        orders = PDStoreConnectorMetadata(self._loads, [], self._aborted_handoffs)
        self._loads, self._aborted_handoffs = [], []
        return orders

    def add_saves(self, orders: PDStoreConnectorMetadata, output: Any) -> None:
        """Orders to save what this step computes; waits a moment if it computes nothing."""
        if output.num_scheduled_tokens:
            self._tables.step(output)
            for request_id in output.num_scheduled_tokens:
                followed = self._requests.get(request_id)
                if followed is not None:
                    self._order_saves(followed, output, orders)
        elif self._refs or any(each.is_waiting for each in self._requests.values()):
            time.sleep(_IDLE_S)

    def report(self, report: StepReport | None, loaded: Sequence[str]) -> None:
        """What the workers did: releases blocks, remembers failures."""
        if report is not None:
            for request_id in report.failed:
                self.give_up(request_id)
            if self._refs is not None:
                self._refs.release(report.released)
        for request_id in loaded:
            followed = self._requests.get(request_id)
            if followed is not None and followed.num_loading:
                followed.num_saved = max(followed.num_saved, followed.num_loading)
                followed.num_loading = 0
                self._metrics.exposed_seconds.observe(time.monotonic() - followed.arrived_at)

    def finish(self, request: Any) -> dict[str, Json] | None:
        """The request has ended, well or not; what P's answer says of the hand-off."""
        self._tables.forget(request.request_id)
        followed = self._requests.pop(request.request_id, None)
        if followed is None:
            return None
        if followed.lookup is not None:
            followed.lookup.cancel()
        if followed.attempt is not None and not followed.is_announced:
            self._aborted_handoffs.append(followed.attempt)
            return None
        return followed.answer or None

    @property
    def is_at_work(self) -> bool:
        """Whether vLLM has to go on stepping although it has no request."""
        return bool(self._aborted_handoffs or self._refs)

    def reset(self) -> bool:
        """Forgets what the pool has of this namespace; False if that failed."""
        return self._cache is None or self._cache.clear()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _order_saves(
        self, followed: RequestTracker, output: Any, orders: PDStoreConnectorMetadata
    ) -> None:
        request = followed.request
        computed, step = request.num_computed_tokens, followed.keys.block_tokens
        if followed.is_prompt_pending and self._settings.role != "decode":
            end = computed + output.num_scheduled_tokens[request.request_id]
            if followed.attempt is not None and not followed.num_saved:
                # In vLLM's prefix cache, so saved before; a hand-off sees if that is still so.
                followed.num_saved = computed - computed % step
            self._order_save(followed, followed.keys.prefix(end), orders)
        elif self._settings.save_decoded:
            # The last token that is known has no KV yet; drafts that were refused never count.
            end = min(computed, request.num_tokens - 1)
            if end // step > followed.num_saved // step:
                self._order_save(followed, followed.decoded_until(end), orders)

    def _order_save(
        self, followed: RequestTracker, keys: PromptKeys, orders: PDStoreConnectorMetadata
    ) -> None:
        """Saves the tokens of `keys` that are new; with the prompt's last one, hands it over."""
        is_end = followed.is_prompt_pending and keys.num_tokens == followed.keys.num_tokens
        attempt = followed.attempt if is_end else None
        if keys.num_tokens <= followed.num_saved and attempt is None:
            return
        request_id = followed.request.request_id
        block_ids = self._tables.of(request_id)
        if block_ids is None or self._refs is None:
            return
        first_token = min(followed.num_saved, keys.num_tokens)
        order = SaveSpec(
            next(self._numbers),
            request_id,
            keys,
            as_pdstores(block_ids, self._blocks_of(keys.num_tokens)),
            first_token,
            attempt,
        )
        # A hand-off may save any block of the prompt again, when the store has lost it.
        first = 0 if attempt else first_token // keys.block_tokens * keys.block_tokens
        self._refs.hold(
            order.number,
            (
                id
                for table in block_ids
                for id in table[first // self._block_tokens : self._blocks_of(keys.num_tokens)]
                if id != NULL_BLOCK
            ),
        )
        followed.num_saved = max(followed.num_saved, keys.num_tokens)
        followed.is_announced |= attempt is not None
        orders.saves.append(order)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


def _usable(found: Match, request: Any) -> int:
    """Leading tokens that vLLM may count as computed when the match is loaded.

    vLLM computes a prompt's last token again. Told that all tokens are there, it gives back the
    block that only this token's window still sees.
    """
    known: int = request.num_tokens
    return min(found.num_tokens, known - 1 if found.keys.namespace.windows else known)
