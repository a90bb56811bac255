"""An LMCache server for tests: its own storage manager over our adapter."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import select
from collections.abc import Sequence

import torch

from lmcache_wheel import (
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
    api,
    config,
    create_l2_adapter,
    parse_args_to_l2_adapters_config,
)
from lmcache_wheel import storage_manager as lmcache
from tests.support.kv import eventually

PLUGIN = {"type": "plugin", "module_path": "pdstore_lmcache", "class_name": "PDStoreL2Adapter"}
SHAPE = (2, 3, 16, 32)  # K and V, layers, tokens, hidden size
EVENT_S = 60.0


def chunk_keys(count: int, prompt: str = "a prompt", **fields: object) -> list[api.ObjectKey]:
    """Returns the names of a prompt's chunks, as LMCache's server makes them."""
    names = {"model_name": "org/model", "kv_rank": api.ObjectKey.ComputeKVRank(1, 0, 1, 0)}
    hashes = [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(count)]
    return [api.ObjectKey(chunk_hash=each, **(names | fields)) for each in hashes]


def layout(dtype: torch.dtype = torch.float16, shape: Sequence[int] = SHAPE):
    """Returns LMCache's description of a chunk."""
    return api.MemoryLayoutDesc([torch.Size(shape)], [dtype])


def adapters_config(**params: object):
    """Returns LMCache's configuration of our adapter, as its command line makes it of params."""
    usual = {"pd_transfer_via_storage": True, "weights": "w1", "staging": "8MiB", "workers": 2}
    spec = PLUGIN | {"adapter_params": usual | params}
    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))


def memory(fill: int = 0, dtype: torch.dtype = torch.float16, shape: Sequence[int] = SHAPE):
    """Returns LMCache's object for the memory of a chunk, each byte of which is `fill`."""
    size = math.prod(shape) * dtype.itemsize
    meta = MemoryObjMetadata(torch.Size(shape), dtype, 0, size, 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(torch.full((size,), fill, dtype=torch.uint8), meta, None)


HALVES = layout()


class Adapter:
    """Our adapter as LMCache's loader makes it, called as LMCache's controllers do.

    params: the adapter's.
    """

    def __init__(self, **params: object) -> None:
        (config,) = adapters_config(**params).adapters
        self.adapter = create_l2_adapter(config)

    def store(self, keys: Sequence[api.ObjectKey], objects: Sequence[TensorMemoryObj]) -> bool:
        """Stores chunks; True if LMCache takes it for a success."""
        number = self.adapter.submit_store_task(list(keys), list(objects))
        _wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[number].is_successful()

    def find(self, keys: Sequence[api.ObjectKey], description=HALVES) -> list[int]:
        """Returns the chunks that are found, by number."""
        number = self.adapter.submit_lookup_and_lock_task(list(keys), {0: description})
        _wait(self.adapter.get_lookup_and_lock_event_fd())
        return self.adapter.query_lookup_and_lock_result(number).get_indices_list()

    def load(self, keys: Sequence[api.ObjectKey], objects: Sequence[TensorMemoryObj]) -> list[int]:
        """Loads chunks. Returns those that came, by number."""
        number = self.adapter.submit_load_task(list(keys), list(objects))
        _wait(self.adapter.get_load_event_fd())
        return self.adapter.query_load_result(number).get_indices_list()

    def close(self) -> None:
        self.adapter.close()


def _wait(descriptor: int) -> None:
    """Waits for an event as LMCache's controllers do."""
    ready, _, _ = select.select([descriptor], [], [], EVENT_S)
    assert ready, "no event in time"
    os.eventfd_read(descriptor)


class Server:
    """LMCache's storage of a server, with 8 MiB of its own memory and our adapter behind it.

    params: the adapter's.
    layout: of its chunks.
    """

    def __init__(self, *, layout=HALVES, **params: object) -> None:
        eviction = config.EvictionConfig("LRU")
        memory = config.L1MemoryManagerConfig(8 << 20, use_lazy=False, shm_name="")
        l1 = config.L1ManagerConfig(memory, eviction=eviction)
        self._layout = layout
        self._manager = lmcache.StorageManager(
            config.StorageManagerConfig(l1, eviction, adapters_config(**params))
        )
        ((_, self.adapter),) = self._manager.l2_adapters()

    def store(self, keys: Sequence[api.ObjectKey], seed: int = 0) -> dict[api.ObjectKey, bytes]:
        """Writes chunks as an engine does, and waits until the adapter has stored all of them."""
        contents = self.write(keys, seed)
        eventually(lambda: self.found(keys) == len(keys))
        return contents

    def write(self, keys: Sequence[api.ObjectKey], seed: int = 0) -> dict[api.ObjectKey, bytes]:
        """Writes chunks into LMCache's memory; its controller stores them in its own time."""
        reserved = self._manager.reserve_write(list(keys), self._layout)
        random = torch.Generator().manual_seed(seed)
        for memory in reserved.values():
            flat = torch.frombuffer(memory.byte_array, dtype=torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=random))
        self._manager.finish_write(list(keys))
        return {key: bytes(memory.byte_array) for key, memory in reserved.items()}

    def found(self, keys: Sequence[api.ObjectKey]) -> int:
        """Counts the chunks that the adapter finds, whatever LMCache's own memory holds."""
        number = self.adapter.submit_lookup_and_lock_task(list(keys), {0: self._layout})
        found = eventually(lambda: self.adapter.query_lookup_and_lock_result(number))
        return found.popcount()

    def prefetch(self, *rows: Sequence[api.ObjectKey]) -> list[dict[api.ObjectKey, bytes]]:
        """Empties LMCache's own memory and gets chunks back. Returns what came, for each row."""
        self._manager.clear(force=True)
        groups = [api.GroupedObjectKeys(list(row), 0, self._layout) for row in rows]
        handle = self._manager.submit_prefetch_task(api.PrefetchTaskSpec(groups))
        assert self._manager.wait_prefetch_status(handle, EVENT_S)
        result = self._manager.query_prefetch_status(handle)
        return [
            self._read(hits.gather(list(row)))
            for row, hits in zip(rows, result.hit_cells, strict=True)
        ]

    def _read(self, keys: list[api.ObjectKey]) -> dict[api.ObjectKey, bytes]:
        if not keys:
            return {}
        with self._manager.read_prefetched_results(keys) as memories:
            return {key: bytes(m.byte_array) for key, m in zip(keys, memories, strict=True)}

    def close(self) -> None:
        self._manager.close()
