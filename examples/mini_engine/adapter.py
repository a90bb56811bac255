"""How pdstore is integrated in an engine: look up, load, save, hand over.

PrefixCacheManager is the scheduler's half, KVPool the worker's half; this engine has both in one
process. Nothing here waits: lookups and jobs are started, and asked about in a later turn.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pdstore
from examples.mini_engine.config import Config
from examples.mini_engine.model import Model
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Request

log = logging.getLogger(__name__)


@dataclass
class _Transfer:
    """What pdstore does for one request."""

    keys: pdstore.PromptKeys
    lookup: pdstore.Lookup
    attempt: pdstore.HandoffId | None = None  # set if this instance is P for the request
    load: pdstore.Job | None = None
    saves: list[pdstore.Job] = field(default_factory=list)
    publish: pdstore.Job | None = None
    num_saved: int = 0  # leading tokens that are in the pool or on their way


class Adapter:
    """One engine's door to the pool. Only the engine's thread calls it, `check` excepted.

    An exception of pdstore costs a request its hits or its hand-off, never more.
    """

    def __init__(
        self, config: Config, model: Model, cache: PagedCache, metrics: pdstore.Metrics
    ) -> None:
        settings = config.settings
        layer = pdstore.LayerSpec(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
        layout = pdstore.Layout.of(
            settings,
            dtype=config.dtype,
            layers=[layer] * model.num_layers,
            engine_block_tokens=config.block_size,
            rope=model.rope,
        )
        weights = pdstore.weights_revision(config.model, settings)
        namespace = layout.namespace(settings, weights=weights)
        self._role = settings.role
        self._metrics = metrics
        self._cache = pdstore.PrefixCacheManager(settings, namespace, metrics=metrics)
        self._pool = pdstore.KVPool(settings, layout, cache.layers, namespace, metrics=metrics)
        self._transfers: dict[Request, _Transfer] = {}

    def check(self, request: Request) -> None:
        """Raises ValueError for a hand-off that is malformed: it comes from a client."""
        pdstore.Handoff.of(request.kv_transfer_params)

    def look_up(self, request: Request) -> None:
        """Asks how much of the prompt the pool has; D waits for its hand-off, bounded."""
        with self._degrading(request):
            is_prefill = self._is_prefill_of(request)
            keys = self._cache.keys(request.prompt)
            lookup = self._cache.lookup(keys, None if is_prefill else request.kv_transfer_params)
            transfer = self._transfers[request] = _Transfer(keys, lookup)
            if is_prefill:
                transfer.attempt, request.answer_params = self._cache.announce(
                    keys, request.kv_transfer_params
                )

    def is_looked_up(self, request: Request) -> bool:
        transfer = self._transfers.get(request)
        return transfer is None or transfer.lookup.poll() is not None

    def load(self, request: Request) -> bool:
        """Starts to load what was found into the request's blocks; False if that is nothing."""
        with self._degrading(request):
            transfer = self._transfers.get(request)
            found = transfer.lookup.poll() if transfer else None
            if transfer is None or found is None:
                return False
            request.miss_reason = found.reason and found.reason.value
            if min(found.num_tokens, len(request.prompt) - 1) > 0:
                transfer.load = self._pool.load(found.keys, request.block_ids, first_token=0)
            return transfer.load is not None
        return False

    def is_loaded(self, request: Request) -> bool:
        """Whether the load has ended. Then what came counts as computed, but for the last token."""
        transfer = self._transfers.get(request)
        if transfer is None or transfer.load is None:
            return True
        result = transfer.load.result
        if result is None:
            return False
        if result.reason is not None:
            request.miss_reason = result.reason.value
        transfer.num_saved = result.num_tokens
        request.num_loaded = min(result.num_tokens, len(request.prompt) - 1)
        request.num_computed = request.num_loaded
        return True

    def save(self, request: Request) -> None:
        """After a chunk of a prompt: saves its new blocks; after the last, publishes them all."""
        with self._degrading(request):
            transfer = self._transfers.get(request)
            if transfer is None or self._role == "decode":
                return
            keys = transfer.keys.prefix(request.num_computed)
            is_end = request.num_computed == len(request.prompt)
            if is_end and transfer.attempt is not None:
                transfer.publish = self._pool.save(
                    keys,
                    request.block_ids,
                    first_token=transfer.num_saved,
                    handoff=transfer.attempt,
                    after=transfer.saves,
                )
            elif keys.num_tokens > transfer.num_saved:
                job = self._pool.save(keys, request.block_ids, first_token=transfer.num_saved)
                transfer.saves.append(job)
            transfer.num_saved = keys.num_tokens

    def cancel(self, request: Request) -> None:
        """The request ended early: nobody waits for its lookup or its load."""
        with self._degrading(request):
            transfer = self._transfers.get(request)
            if transfer is not None:
                transfer.lookup.cancel()
                if transfer.load is not None:
                    transfer.load.cancel()
                if transfer.attempt is not None and transfer.publish is None:
                    self._pool.abort_handoff(transfer.attempt)

    def is_done(self, request: Request) -> bool:
        """Whether no job reads or writes the request's blocks any more: they may be given back."""
        transfer = self._transfers.get(request)
        if transfer is None:
            return True
        is_done = all(job.done for job in (transfer.load, transfer.publish) if job is not None)
        if not (is_done and all(job.captured for job in transfer.saves)):
            return False
        del self._transfers[request]
        return True

    def close(self) -> None:
        """Gives running jobs the drain time, then ends them. Twice is fine."""
        self._pool.close()
        self._cache.close()

    def _is_prefill_of(self, request: Request) -> bool:
        """Whether this instance publishes the prompt for another one."""
        params = request.kv_transfer_params or {}
        return self._role == "prefill" or (
            self._role == "both" and params.get("do_remote_decode") is True
        )

    @contextlib.contextmanager
    def _degrading(self, request: Request) -> Iterator[None]:
        try:
            yield
        except Exception:  # the border to pdstore: a fault is a miss
            log.exception("pdstore failed for a request, which goes on without it")
            self._metrics.miss(pdstore.Reason.FAULT)
            request.miss_reason = pdstore.Reason.FAULT.value
