"""PDStoreHiCache: passes the calls of SGLang's hooks (HiCacheStorage) to a PagePool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from pdstore.adapters.sglang.pages import (
    VERSIONS,
    HostPages,
    PagePool,
    refuse_unsupported,
    served_model,
    server_arguments,
    settings_of,
    warn_if_prefetch_skips_waiting,
)
from pdstore.errors import ConfigError, Reason
from pdstore.metrics import Metrics
from pdstore.threads import call_or

log = logging.getLogger(__name__)

_HOOKS = ("register_mem_pool_host", "batch_exists", "batch_get_v1", "batch_set_v1", "clear")
_KV = "kv"


class PDStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """Stores pages of SGLang's host pool in pdstore's pool, and loads them from there.

    There is one in each rank. SGLang's prefetch and backup threads call the hooks. Each hook logs
    all exceptions and counts a miss, because an exception would end the calling thread.

    Without PD_TRANSFER_VIA_STORAGE=1 nothing is stored and nothing is found.
    Raises ConfigError from the constructor and from the `register` methods for a server whose
    configuration pdstore does not support.

    storage_config: a HiCacheStorageConfig; its `extra_config` may hold settings.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        missing = [name for name in _HOOKS if not hasattr(HiCacheStorage, name)]
        if missing:
            raise ConfigError(
                f"this SGLang's HiCacheStorage has no {', '.join(missing)}; pdstore supports"
                f" {VERSIONS}"
            )
        self.metrics = Metrics()
        self._config = storage_config
        self._settings = settings_of(storage_config.extra_config or {})
        is_saver = self._settings.role != "decode" or self._settings.save_decoded
        self._saves = is_saver and self._settings.publish
        self._pool: PagePool | None = None
        if not self._settings.pd_transfer_via_storage:
            log.info("PD_TRANSFER_VIA_STORAGE is not 1: pdstore stores and finds nothing")
            return
        self._args = server_arguments()
        refuse_unsupported(storage_config, self._args)
        warn_if_prefetch_skips_waiting(self._settings, self._args)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens a PagePool for SGLang's host pool, which SGLang has allocated before the call."""
        super().register_mem_pool_host(mem_pool_host)
        if not self._settings.pd_transfer_via_storage:
            return
        for entry in getattr(mem_pool_host, "entries", ()):  # SGLang groups even one pool
            self._refuse_hybrid(entry.name)
            mem_pool_host = entry.host_pool
        served = served_model(self._settings, self._args, mem_pool_host.dtype)
        rank = self._config.tp_rank
        size = self._config.tp_size
        pages = HostPages.of_host_pool(mem_pool_host, served, rank, size)
        number = (getattr(self._config, "dp_rank", 0) or 0) * size + rank
        self._pool = PagePool(self._settings, pages, served.weights, self.metrics, number)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Does nothing for the KV pool, which is registered already; refuses any other pool."""
        if self._settings.pd_transfer_via_storage:
            self._refuse_hybrid(host_pool_name)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many leading pages are stored or expected soon.

        D waits, up to a timeout, until P has stored the first missing page. If P has, the pages
        behind it count as well: P is storing the prompt, and `batch_get_v1` waits for them.
        """
        pool = self._pool
        return 0 if pool is None else self._guarded(lambda: pool.num_stored(keys))

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into the host pool; returns True for each page that was loaded.

        SGLang itself computes the first page that was not loaded, and all tokens after it.
        """
        pool = self._pool
        done = 0 if pool is None else self._guarded(lambda: pool.load(keys, host_indices))
        return [number < done for number in range(len(keys))]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages of the host pool; returns True for each page that is stored.

        An instance that does not save returns True for every page, because SGLang warns of False.
        """
        pool = self._pool if self._saves else None
        done = len(keys) if pool is None else self._guarded(lambda: pool.save(keys, host_indices))
        return [number < done for number in range(len(keys))]

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Returns None, which is a miss. `batch_get` says why."""

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Returns only misses: SGLang asks here for a draft model's pages, which are not stored."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores nothing: SGLang passes only a draft model's pages to this hook."""
        return False

    def clear(self) -> None:
        """Forgets all values of this namespace; the values of other namespaces stay."""
        pool = self._pool
        if pool is not None:
            self._guarded(lambda: int(pool.clear()))

    def close(self) -> None:
        """Ends all jobs and connections; SGLang calls it when it detaches the backend.

        A second call does nothing.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _refuse_hybrid(self, name: Any) -> None:
        if str(name) != _KV:
            raise ConfigError(
                f"pdstore does not keep the pages of the pool {name}, and KV without them would"
                " give wrong answers: models with sliding windows, Mamba states or an indexer, and"
                " draft models with a host pool of their own, are not supported in SGLang"
            )

    def _guarded(self, hook: Callable[[], int]) -> int:
        """Returns the number that `hook` returns; if `hook` raises, counts a miss, returns 0."""
        done = call_or(hook, None)
        if done is None:
            self.metrics.miss(Reason.FAULT)
        return done or 0
