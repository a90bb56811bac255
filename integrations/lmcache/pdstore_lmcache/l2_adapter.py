"""PDStoreL2Adapter: maps the hooks of LMCache's L2AdapterInterface to a ChunkPool."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import prometheus_client
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from pdstore.errors import LayoutError
from pdstore.metrics import Metrics
from pdstore.settings import empty_settings, read_engine_settings
from pdstore.threads import call_or
from pdstore_lmcache.chunk_names import (
    ChunkNames,
    ChunkShape,
    ObjectKey,
    payload_bytes,
    shape_of,
)
from pdstore_lmcache.chunk_pool import ChunkMemory, ChunkPool
from pdstore_lmcache.chunk_task import Ended

log = logging.getLogger(__name__)

T = TypeVar("T")


class PDStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps LMCache's chunks in a pdstore pool.

    LMCache's server makes one and calls its hooks on two threads; they return at once. Without
    PD_TRANSFER_VIA_STORAGE=1 nothing is stored and nothing is found.

    params: LMCache's `adapter_params`: settings in lower case without PDSTORE_, and
      `kv_cache_dtype`, the engine's, where its KV is kept as bytes. They win over the environment.
    l1_memory_desc: LMCache's; not used.
    Raises ConfigError, or StoreError where the store is required.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        params = dict(params)
        kv_cache_dtype = params.pop("kv_cache_dtype", None)
        settings = read_engine_settings(**params)
        self._numbers = itertools.count()
        self._stored: TaskResults[Any] = TaskResults(create_event_notifier())
        self._found: TaskResults[Any] = TaskResults(create_event_notifier())
        self._loaded: TaskResults[Any] = TaskResults(create_event_notifier())
        self._shapes: dict[tuple[str, int], ChunkShape] = {}
        self._pool: ChunkPool | None = None
        if settings.pd_transfer_via_storage:
            names = ChunkNames(settings, kv_cache_dtype)
            self._pool = ChunkPool(settings, names, process_metrics())
            log.info("pool %s%s", self._pool.label, empty_settings(settings))
        else:
            log.info("PD_TRANSFER_VIA_STORAGE is not 1: pdstore stores and finds nothing")

    def get_store_event_fd(self) -> int:
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno()

    def submit_store_task(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Begins to store chunks; the task succeeds if others can load all of them."""
        number = next(self._numbers)

        def ended(result: Ended) -> None:
            sizes = [chunk.get_size() for chunk in objects]
            is_stored = all(result.done)
            if is_stored:
                call_or(lambda: self._notify_keys_stored(list(keys), sizes), None)
            self._stored.add(number, L2StoreResult(is_stored, sum(sizes) if is_stored else 0))

        pool, chunks = self._pool, self._chunks(keys, objects)
        if pool is None or chunks is None:
            ended(Ended((False,) * len(keys)))
        else:
            pool.save(chunks, ended)
        return number

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stored.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Begins to look for chunks; those that are stored are leased, as far as the store can."""
        number = next(self._numbers)

        def ended(result: Ended) -> None:
            self._found.add(number, _bitmap(result.done))

        shapes = [self._shape(key, group_layout_descs) for key in keys]
        pool = self._pool
        if pool is None:
            ended(Ended((False,) * len(keys)))
        else:
            pool.find(list(zip(keys, shapes, strict=True)), ended)
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._found.pop(task_id)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Does nothing: a lease ends by itself."""

    def submit_load_task(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Begins to load chunks into LMCache's memory."""
        number = next(self._numbers)

        def ended(result: Ended) -> None:
            loaded = [key for key, is_done in zip(keys, result.done, strict=True) if is_done]
            if loaded:
                call_or(lambda: self._notify_keys_accessed(loaded), None)
            self._loaded.add(number, _bitmap(result.done))

        pool, chunks = self._pool, self._chunks(keys, objects)
        if pool is None or chunks is None:
            ended(Ended((False,) * len(keys)))
        else:
            pool.load(chunks, ended)
        return number

    def query_load_result(self, task_id: int) -> Any:
        return self._loaded.pop(task_id)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forgets chunks, for every server of the pool; LMCache evicts so by quota."""
        pool = self._pool
        known = [(key, shape) for key in keys if (shape := self._shape(key, {}))]
        if pool is not None and known:
            call_or(lambda: self._delete(pool, known), None)

    def close(self) -> None:
        """Ends running tasks and the connections. Twice is fine."""
        if self._pool is not None:
            self._pool.close()
        for results in (self._stored, self._found, self._loaded):
            results.close()

    def report_status(self) -> dict[str, Any]:
        """Returns the state of this adapter for LMCache's own status page."""
        pool = self._pool
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "store": None if pool is None else pool.label,
            "is_on": pool is not None,
        }

    def _chunks(
        self, keys: Sequence[ObjectKey], objects: Sequence[Any]
    ) -> list[ChunkMemory] | None:
        """Returns LMCache's chunks; None, with the reason in the log, if they cannot be moved."""
        pairs = list(zip(keys, objects, strict=True))
        chunks = call_or(lambda: [_chunk_of(*pair) for pair in pairs], None)
        for key, shape, _ in chunks or ():
            self._shapes[key.model_name, key.object_group_id] = shape
        return chunks

    def _shape(self, key: ObjectKey, descriptions: Mapping[int, Any]) -> ChunkShape:
        """Returns a chunk's shape; where LMCache does not tell, that of the last one like it."""
        told = descriptions.get(key.object_group_id)
        if told is not None and told.shapes:
            return shape_of(told.shapes, told.dtypes)
        return self._shapes.get((key.model_name, key.object_group_id), ())

    def _delete(self, pool: ChunkPool, chunks: Sequence[tuple[ObjectKey, ChunkShape]]) -> None:
        pool.remove(chunks)
        sizes = [payload_bytes(shape) for _, shape in chunks]
        self._notify_keys_deleted([key for key, _ in chunks], sizes)


class TaskResults(Generic[T]):
    """The results of one kind of task, by the task's number. Any thread may call it.

    notifier: LMCache's EventNotifier, which tells it of each result; it is closed with this.
    """

    def __init__(self, notifier: Any) -> None:
        self._notifier = notifier
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._is_closed = False

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable with a result."""
        descriptor: int = self._notifier.fileno()
        return descriptor

    def add(self, number: int, result: T) -> None:
        """Keeps a result until it is fetched; after `close` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._results[number] = result
            self._notifier.notify()

    def pop(self, number: int) -> T | None:
        """Returns a result, once; None while there is none."""
        with self._lock:
            return self._results.pop(number, None)

    def pop_all(self) -> dict[int, T]:
        """Returns all results that were not fetched."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Closes the descriptor. Twice is fine."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()


@functools.cache
def process_metrics() -> Metrics:
    """The metrics of all adapters of this process, among those that LMCache's server shows."""
    return Metrics(prometheus_client.REGISTRY)


def _chunk_of(key: ObjectKey, memory: Any) -> ChunkMemory:
    """Returns a chunk from LMCache's MemoryObj. Raises LayoutError for one that is not whole."""
    meta = memory.metadata
    shape = shape_of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
    if memory.get_size() != payload_bytes(shape):
        raise LayoutError(
            f"{memory.get_size()} bytes for tensors of {payload_bytes(shape)}: pdstore does not"
            " keep chunks that LMCache has compressed (serde)"
        )
    return ChunkMemory(key, shape, memory.byte_array)


def _bitmap(done: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(done))
    bitmap.batched_set([number for number, is_done in enumerate(done) if is_done])
    return bitmap
