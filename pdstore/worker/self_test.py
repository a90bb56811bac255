"""self_test: tries the store with a block of an engine's own layout, before the engine serves."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence

import torch

from pdstore.errors import StoreError
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.connect import connect_store
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

log = logging.getLogger(__name__)

_GRACE_S = 60.0  # a job ends at its deadline; this is for a machine that is late
_MOST_ID = 1 << 15


def self_test(settings: Settings, layout: Layout, kv_caches: Sequence[torch.Tensor]) -> None:
    """Saves a random block, loads it elsewhere, and compares every byte of it.

    Block copies, staging and store are those that the engine will use; the KV cache is a small one
    on the device, and in the order in memory, of the engine's own, which is not touched. The block
    is of a namespace of its own, and removed at the end.

    kv_caches: the engine's, as `KVPool` takes them.
    Raises StoreError with the step that failed; ConfigError and LayoutError as `KVPool` does.
    """
    store = connect_store(settings, Metrics())
    try:
        _try(store, settings.model_copy(update={"publish": True}), layout, kv_caches)
    finally:
        store.close()
    log.info("self-test: a block of %d tokens came back byte for byte", layout.block_tokens)


def _try(
    store: Store, settings: Settings, layout: Layout, kv_caches: Sequence[torch.Tensor]
) -> None:
    namespace = layout.namespace(settings, weights=f"selftest:{secrets.token_hex(8)}")
    keys = PromptKeys(namespace).extend(
        [secrets.randbelow(_MOST_ID) for _ in range(layout.block_tokens)]
    )
    num = layout.block_tokens // layout.engine_block_tokens
    here, there = ([list(ids)] * layout.num_tables for ids in (range(num), range(num, 2 * num)))
    caches = [_random_like(cache, 2 * num) for cache in kv_caches]
    pool = KVPool(settings, layout, caches, namespace, store=store)
    try:
        pool.ready()
        _wait("save", keys, lambda: pool.save(keys, here), settings.save_deadline_s)
        _wait("load", keys, lambda: pool.load(keys, there), settings.load_deadline_s)
    finally:
        pool.close()
        with contextlib.suppress(StoreError):
            store.remove(keys.store_keys(layout.parts))
    if not all(torch.equal(values[:num], values[num:]) for values in _bytes_of(caches)):
        raise StoreError(f"the self-test's block came back from {store.label} with other bytes")


def _bytes_of(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [cache.view(torch.uint8) for cache in caches]  # NaN is not equal to itself


def _wait(step: str, keys: PromptKeys, start: Callable[[], Job], deadline_s: float) -> None:
    result = start().wait(deadline_s + _GRACE_S)
    if result.num_tokens != keys.num_tokens:
        why = result.reason.value if result.reason else "unknown"
        raise StoreError(f"the self-test's {step} failed ({why}): {result.error or ''}")


def _random_like(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns random blocks whose dimensions lie in memory in the same order as the cache's."""
    outermost_first = sorted(range(cache.dim()), key=cache.stride, reverse=True)
    shape = (num_blocks, *cache.shape[1:])
    made = torch.empty_permuted(shape, outermost_first, dtype=cache.dtype, device=cache.device)
    return made.copy_(torch.randn(shape, device=cache.device))
