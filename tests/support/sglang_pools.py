"""Servers of hybrid models for tests: SGLang's own controller over several of its host pools.

The controller attaches the storage backend, asks for pages, and moves them, as SGLang does it. What
its prefix tree does between these steps (which pages and slots to use) is given by the test.
"""

from __future__ import annotations

import queue
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel

hicache_storage = wheel.hicache_storage
if not hasattr(hicache_storage.HiCacheStorage, "on_host_pools_registered"):
    pytest.skip("pools beside KV are served from SGLang 0.5.23 on", allow_module_level=True)

from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.host_pool_decl import (  # noqa: E402
    HostPoolDecl,
    HostPoolStorageInfo,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402

PoolName = hicache_storage.PoolName
PoolHitPolicy = hicache_storage.PoolHitPolicy
PoolTransfer = hicache_storage.PoolTransfer
PAGE = kit.PAGE


class Prompt:
    """Stands for a prompt's tokens: the hashes of its pages, and as many tokens as they have."""

    def __init__(self, hashes: Sequence[str]) -> None:
        self.hashes = list(hashes)

    def __len__(self) -> int:
        return len(self.hashes) * PAGE


def _hashes_of(prompt: Prompt, last: str | None, page_size: int) -> list[str]:
    return prompt.hashes


hybrid_cache_controller.get_storage_hash_str = _hashes_of
wheel.cache_controller.get_parallel = lambda: types.SimpleNamespace(attn_dcp_size=1)


def mamba_pool(
    *, slots: int = 32, heads: int = 2, dtype: torch.dtype = torch.float32, rows: int = 3
):
    """Returns SGLang's host pool of Mamba states for three layers, filled at random."""
    info = MambaStateBufferInfo(
        conv=(torch.zeros(3, slots, 8, rows), torch.zeros(3, slots, 4, rows)),
        temporal=torch.zeros(3, slots, heads, 4, 4, dtype=dtype),
    )
    pool = MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")
    for buffer in pool.kv_buffer:
        _fill(buffer)
    return pool


def indexer_pool(anchor, *, layers: int = 2, width: int = 132):
    """Returns SGLang's host pool of DSA's indexer beside a pool with MLA, filled at random."""
    device = types.SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=layers,
        layer_num=layers,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[torch.zeros(1, PAGE * width) for _ in range(layers)],
    )
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=width, dtype=torch.uint8),
        host_pool_builder=None,
    )
    pool = DSAIndexerPoolHost(decl, anchor, pin_memory=False)
    _fill(pool.index_k_with_scale_buffer)
    return pool


def _fill(buffer: torch.Tensor) -> None:
    flat = buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


def page_of(pool, number: int) -> bytes:
    """Returns the bytes of a page or state of a host pool, as SGLang itself reads it."""
    return bytes(pool.get_data_page(number * pool.page_size).contiguous().view(torch.uint8).numpy())


def indices_of(pool, numbers: Sequence[int]) -> torch.Tensor:
    """Returns SGLang's host indices of pages, or of states, of a pool."""
    step = pool.page_size
    return torch.cat([torch.arange(n * step, (n + 1) * step) for n in numbers])


def asked(name: str, num_last: int | None = None, *, of: str | None = None):
    """Returns what SGLang asks of a pool: its last pages, or (None) all pages that KV has.

    of: the pool whose last pages it also has, under the same numbers.
    """
    if num_last is None:
        return PoolTransfer(name=PoolName(name), indices_from_pool=PoolName.KV)
    return PoolTransfer(
        name=PoolName(name),
        keys=["__placeholder__"] * num_last,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
        indices_from_pool=of and PoolName(of),
    )


class HybridServer:
    """A rank of a server with several host pools, which are named as SGLang names them.

    pools: SGLang's host pools; that of KV is the first.
    options: as `Server` of tests.support.sglang_server takes them.
    """

    def __init__(
        self,
        pools: Mapping[str, object],
        model: Path,
        *,
        arguments: dict[str, object] | None = None,
        config: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        self.pools = dict(pools)
        arguments = kit.server_args(model, **(arguments or {}))
        wheel.runtime_context.get_context().set_server_args(arguments)
        extra = {**kit.DYNAMIC, "pd_transfer_via_storage": True, "staging": "8MiB", **settings}
        entries = [
            PoolEntry(PoolName(name), pool, None, lambda layer: layer, name == "kv")
            for name, pool in pools.items()
        ]
        kind = hybrid_cache_controller.HybridCacheController
        self.controller = kind.__new__(kind)  # its constructor needs a GPU
        group = HostPoolGroup(entries)
        vars(self.controller).update(
            page_size=PAGE,
            mem_pool_host=group,
            storage_host_pool=group.anchor_entry.host_pool,
            host_memory_mode="cache",
            enable_storage=False,
            storage_backend=None,
            pp_group=None,
            prefetch_sync_queue=queue.Queue(),
            storage_stop_event=types.SimpleNamespace(clear=lambda: None),
            extra_host_mem_release_queues={},
            _generate_storage_config=lambda *_: kit.storage_config(extra, **(config or {})),
            _create_sync_groups=lambda: [],
            _start_storage_threads=lambda: None,
            _stop_storage_threads=lambda: None,
            append_host_mem_release=lambda *_, **__: None,
        )
        self.controller.attach_storage_backend("dynamic", host_pools=entries)
        self.backend = self.controller.storage_backend

    def backup(
        self, hashes: Sequence[str], pages: Sequence[int], **sidecars: Mapping[str, int]
    ) -> dict[str, int]:
        """Stores pages as SGLang's backup thread does; returns how many of each pool it counts.

        sidecars: by a pool's name, by the hash of a page the number of its page there. Those of an
          indexer and of drafts are not given: they have KV's numbers, or those of windows.
        """
        transfers = self.derived()
        for transfer in transfers:
            if transfer.indices_from_pool == "swa":
                transfer.keys = None  # SGLang takes those of the windows
        for name, numbers in sidecars.items():
            transfer = asked(name, len(numbers))
            transfer.keys = list(numbers)
            transfer.host_indices = indices_of(self.pools[name], list(numbers.values()))
            transfers.append(transfer)
        operation = hybrid_cache_controller.StorageOperation(
            kit.indices_of(pages), [], hash_value=list(hashes), pool_transfers=transfers
        )
        self.controller._page_backup(operation)
        stored = operation.pool_storage_result.extra_pool_hit_pages
        return {"kv": operation.completed_tokens // PAGE} | {str(n): k for n, k in stored.items()}

    def derived(self, num_last: int = 0) -> list:
        """Returns what SGLang asks of pools with the numbers of others. num_last: of windows."""
        whole = [name for name in ("indexer", "draft", "draft_indexer") if name in self.pools]
        transfers = [asked(name) for name in whole]
        if "draft_swa" in self.pools:
            transfers.append(asked("draft_swa", num_last, of="swa"))
        return transfers

    def add(self, name: str, pool) -> None:
        """Registers a host pool when the storage backend is attached, as SGLang does a draft's."""
        self.pools[name] = pool
        entry = PoolEntry(PoolName(name), pool, None, lambda layer: layer, False)
        self.controller.register_host_pool_entry(entry)

    def query(self, hashes: Sequence[str], *transfers):
        """Asks which pages are stored, as SGLang's prefetch thread does; returns its operation."""
        handle = types.SimpleNamespace(rid="a request")
        operation = hybrid_cache_controller.PrefetchOperation(
            handle, Prompt(hashes), pool_transfers=list(transfers)
        )
        operation.hash_value, operation.storage_hit_count = self.controller._storage_hit_query(
            operation
        )
        return operation

    def cut(self, operation) -> int:
        """Lets all ranks agree on a length, as SGLang's prefetch thread does; returns the pages."""
        tokens = self.controller._sync_prefetch_hit_query(operation, operation.storage_hit_count)
        operation.hash_value = operation.hash_value[: tokens // PAGE]
        operation.storage_hit_count = tokens
        return tokens // PAGE

    def transfer(
        self, operation, pages: Sequence[int], **sidecars: Sequence[int]
    ) -> dict[str, int]:
        """Loads what was found as SGLang's I/O thread does; returns how many pages came, by pool.

        sidecars: by a pool's name, the numbers of the pages to load into.
        """
        operation.host_indices = kit.indices_of(pages)
        for transfer in operation.pool_transfers:
            if transfer.indices_from_pool is None:
                name = str(transfer.name)
                transfer.host_indices = indices_of(self.pools[name], sidecars[name])
        self.controller._page_transfer(operation)
        come = {"kv": 0}
        while not self.controller.prefetch_sync_queue.empty():
            ack = self.controller.prefetch_sync_queue.get()
            come["kv"] = max(come["kv"], (ack.completed_tokens or 0) // PAGE)
            come |= {str(name): number for name, number in (ack.pool_hits or {}).items()}
        return come

    def page(self, pool: str, number: int) -> bytes:
        """Returns the bytes of a page, or of a state, in SGLang's own order."""
        return page_of(self.pools[pool], number)

    def close(self) -> None:
        self.backend.close()


def agree(ranks: Sequence[HybridServer], operations: Sequence) -> int:
    """Lets ranks agree on a length, with SGLang's own numbers and their minimum; returns it."""
    packed: list[torch.Tensor] = []

    def collect(numbers: torch.Tensor, *_: object) -> None:
        packed.append(numbers.clone())

    def reduce(numbers: torch.Tensor, *_: object) -> None:
        numbers.copy_(torch.stack(packed[: len(ranks)]).amin(0))

    for all_reduce, cut in ((collect, False), (reduce, True)):
        for rank, operation in zip(ranks, operations, strict=True):
            vars(rank.controller).update(_all_reduce=all_reduce, prefetch_hits_sync_groups=[])
            hits = operation.storage_hit_count
            if cut:
                agreed = rank.cut(operation)
            else:
                rank.controller._sync_prefetch_hit_query(operation, hits)
    return agreed
