"""PDStoreHiCache: passes the calls of SGLang's hooks (HiCacheStorage) to a PagePool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from pdstore.adapters.sglang.host_pools import (
    DRAFTS,
    KV,
    VERSIONS,
    HostPages,
    ServedModel,
    check_host_pool,
    pages_of,
)
from pdstore.adapters.sglang.pages import (
    PagePool,
    refuse_unsupported,
    served_draft,
    served_model,
    server_arguments,
    settings_of,
    warn_if_prefetch_skips_waiting,
)
from pdstore.adapters.sglang.sidecars import Restorable
from pdstore.errors import ConfigError, Reason
from pdstore.metrics import Metrics
from pdstore.threads import call_or

log = logging.getLogger(__name__)

_HOOKS = ("register_mem_pool_host", "batch_exists", "batch_get_v1", "batch_set_v1", "clear")
_TELLS_END = "on_host_pools_registered"
"""The hook with which SGLang ends its registration of host pools, from 0.5.23 on.

From then on its ranks also combine the lengths that each can restore: before, they take the least
of them, after which a rank may have no state or no window.
"""
_POLICIES = {"all_pages": False, "trailing_pages": True}
"""By SGLang's name of a policy: whether only the last pages of a pool are needed."""
T = TypeVar("T")


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
        self._host_pools: dict[str, Any] = {}
        self._pool: PagePool | None = None
        self._served: ServedModel | None = None
        if not self._settings.pd_transfer_via_storage:
            log.info("PD_TRANSFER_VIA_STORAGE is not 1: pdstore stores and finds nothing")
            return
        self._args = server_arguments()
        refuse_unsupported(storage_config, self._args)
        warn_if_prefetch_skips_waiting(self._settings, self._args)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes SGLang's host pool of KV, which SGLang has allocated before the call."""
        super().register_mem_pool_host(mem_pool_host)
        if not self._settings.pd_transfer_via_storage:
            return
        for entry in getattr(mem_pool_host, "entries", ()):  # SGLang groups even one pool
            self._refuse_sidecar(str(entry.name))
            mem_pool_host = entry.host_pool
        self._host_pools = {KV: mem_pool_host}
        check_host_pool(KV, mem_pool_host)
        if not hasattr(HiCacheStorage, _TELLS_END):
            self._open()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes a host pool beside that of KV; refuses one that pdstore does not support.

        SGLang registers those of a draft model after all others, when the pool has been opened.
        """
        name = str(host_pool_name)
        if name == KV or not self._settings.pd_transfer_via_storage:
            return
        self._refuse_sidecar(name)
        check_host_pool(name, host_pool)
        if self._pool is not None and name not in DRAFTS:
            raise ConfigError(f"the host pool {name} came after the storage backend had started")
        self._host_pools[name] = host_pool
        if self._pool is not None:
            self._pool.add(self._pages())

    def on_host_pools_registered(self) -> None:
        """Opens a PagePool for all host pools: they have one namespace together."""
        if self._settings.pd_transfer_via_storage:
            self._open()

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Returns after how many pages SGLang can go on with all of its host pools.

        As in SGLang's own backends, the answer has all of these lengths, because another rank may
        have other pages: the ranks take the largest that all of them have.
        """
        pool = self._pool
        none = Restorable()
        found = none
        if pool is not None:
            num_last = partial(_num_last, pool_transfers or ())
            found = self._guarded(lambda: pool.restorable(keys, num_last()), none)
        last = found.lengths[-1] if found.lengths else 0
        return hicache_storage.PoolTransferResult(last, dict(found.by_pool), found.lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """Loads pages into host pools; returns, by pool, True for each page that was loaded.

        It is True for every page of a draft model: see `PagePool.load`.
        """
        pool = self._pool
        if pool is None:
            return _answers(transfers, lambda _: 0)
        return _answers(
            transfers,
            lambda of: self._guarded(
                lambda: pool.load(of.keys or (), of.host_indices, str(of.name)),
                len(of.keys or ()) if str(of.name) in DRAFTS else 0,
            ),
        )

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """Stores pages of host pools; returns, by pool, True for each page that is stored.

        An instance that does not save returns True for every page, as in `batch_set_v1`.
        """
        pool = self._pool if self._saves else None
        if pool is None:
            return _answers(transfers, lambda of: len(of.keys or ()))
        return _answers(
            transfers,
            lambda of: self._guarded(
                lambda: pool.save(of.keys or (), of.host_indices, str(of.name)), 0
            ),
        )

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many leading pages are stored or expected soon.

        D waits, up to a timeout, until P has stored the first missing page. If P has, the pages
        behind it count as well: P is storing the prompt, and `batch_get_v1` waits for them.
        """
        pool = self._pool
        return 0 if pool is None else self._guarded(lambda: pool.num_stored(keys), 0)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into the host pool; returns True for each page that was loaded.

        SGLang itself computes the first page that was not loaded, and all tokens after it.
        """
        pool = self._pool
        done = 0 if pool is None else self._guarded(lambda: pool.load(keys, host_indices), 0)
        return [number < done for number in range(len(keys))]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages of the host pool; returns True for each page that is stored.

        An instance that does not save returns True for every page, because SGLang warns of False.
        """
        pool = self._pool if self._saves else None
        done = len(keys)
        if pool is not None:
            done = self._guarded(lambda: pool.save(keys, host_indices), 0)
        return [number < done for number in range(len(keys))]

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Returns None, which is a miss. `batch_get` says why."""

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Returns only misses: up to 0.5.18 SGLang asks here for a draft model's pages.

        They are not stored: SGLang does not register their host pool there, so nothing says what
        their bytes are. It goes on without them.
        """
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
            self._guarded(pool.clear, False)

    def close(self) -> None:
        """Ends all jobs and connections; SGLang calls it when it detaches the backend.

        A second call does nothing.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _open(self) -> None:
        self._served = served_model(self._settings, self._args, self._host_pools[KV].dtype)
        rank, size = self._config.tp_rank, self._config.tp_size
        number = (getattr(self._config, "dp_rank", 0) or 0) * size + rank
        weights = self._served.weights
        self._pool = PagePool(self._settings, self._pages(), weights, self.metrics, number)

    def _pages(self) -> dict[str, HostPages]:
        served = self._served
        assert served is not None
        if not DRAFTS.isdisjoint(self._host_pools):
            served = served._replace(draft=served_draft(self._settings, self._args))
        return pages_of(self._host_pools, served, self._config.tp_rank, self._config.tp_size)

    def _refuse_sidecar(self, name: str) -> None:
        """Raises ConfigError for a pool beside KV if this SGLang is older than its hooks for it."""
        if name != KV and not hasattr(HiCacheStorage, _TELLS_END):
            raise ConfigError(
                f"pdstore does not keep the pages of the pool {name} before SGLang 0.5.23, and KV"
                " without them would give wrong answers: update SGLang to serve models with sliding"
                " windows, Mamba states or an indexer"
            )

    def _guarded(self, hook: Callable[[], T], otherwise: T) -> T:
        """Returns what `hook` returns; if it raises, counts a miss and returns `otherwise`."""
        done = call_or(hook, None)
        if done is None:
            self.metrics.miss(Reason.FAULT)
            return otherwise
        return done


def _num_last(transfers: Sequence[Any]) -> dict[str, int | None]:
    """Returns by pool how many of the last pages SGLang needs; None for all pages.

    Raises ValueError for a policy that pdstore does not know.
    """
    found: dict[str, int | None] = {}
    for transfer in transfers:
        policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
        if policy not in _POLICIES:
            raise ValueError(
                f"the pool {transfer.name} asks for pages by an unknown rule, {policy}"
            )
        found[str(transfer.name)] = max(1, len(transfer.keys or ())) if _POLICIES[policy] else None
    return found


def _answers(transfers: Sequence[Any], num_done: Callable[[Any], int]) -> dict[Any, list[bool]]:
    """Returns by pool, for each of its pages, whether it is one of the first `num_done` pages."""
    answers = {}
    for transfer in transfers:
        done = num_done(transfer)
        answers[transfer.name] = [number < done for number in range(len(transfer.keys or ()))]
    return answers
