"""One rank of an SGLang server for tests: its own controller over a host pool and our backend."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import types
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.kv import eventually
from tests.support.sglang_wheel import (
    StorageBackendFactory,
    cache_controller,
    hicache_storage,
    runtime_context,
)

PAGE = 64


def _as_named(tokens: Sequence[str], last: str | None, page_size: int) -> list[str]:
    """Stands for SGLang's hash of tokens: tests give the hashes of pages in the tokens' place."""
    return list(tokens)


if hasattr(cache_controller, "get_storage_hash_str"):  # from SGLang 0.5.20 on
    cache_controller.get_storage_hash_str = _as_named
DYNAMIC = {
    "backend_name": "pdstore",
    "module_path": "pdstore.adapters.sglang",
    "class_name": "PDStoreHiCache",
    "interface_v1": 1,
}


def checkpoint(directory: Path, weights: bytes = b"w", **config: object) -> Path:
    """Writes the files of a model that the backend reads."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"rope_theta": 1e4, **config}))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def server_args(model: Path, **changes: object) -> types.SimpleNamespace:
    """Returns the arguments that the backend asks for, as a server has them by default."""
    arguments = {
        "model_path": str(model),
        "revision": None,
        "load_format": "auto",
        "quantization": None,
        "quantization_param_path": None,
        "kv_cache_dtype": "auto",
        "context_length": None,
        "json_model_override_args": "{}",
        "enable_lora": None,
        "lora_paths": None,
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    return types.SimpleNamespace(**(arguments | changes))


def storage_config(extra: dict[str, object], **changes: object):
    """Returns SGLang's own configuration of a backend."""
    fields = {
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1},
        **{"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False},
        **{"enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m"},
    }
    return hicache_storage.HiCacheStorageConfig(**(fields | changes), extra_config=extra)


def page_hashes(count: int, prompt: str = "a prompt") -> list[str]:
    """Returns SHA-256 of each page and all before it, in hex, as SGLang names pages."""
    names, last = [], prompt
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        names.append(last)
    return names


def indices_of(pages: Sequence[int]) -> torch.Tensor:
    """Returns SGLang's host indices of some pages: one for each token."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Server:
    """A rank that stores and finds pages as SGLang's threads do.

    pool: SGLang's host pool.
    settings: of the extra config.
    arguments: the server's, where they are not the usual ones.
    config: fields of the storage configuration, where they are not those of a single rank.
    """

    def __init__(
        self,
        pool,
        model: Path,
        *,
        arguments: dict[str, object] | None = None,
        config: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        self.pool = pool
        self._asking: threading.Thread | None = None
        self._stop = threading.Event()
        runtime_context.get_context().set_server_args(server_args(model, **(arguments or {})))
        extra = {**DYNAMIC, "pd_transfer_via_storage": True, "staging": "8MiB", **settings}
        self.backend = StorageBackendFactory.create_backend(
            "dynamic", storage_config(extra, **(config or {})), pool
        )
        self.backend.register_mem_pool_host(pool)
        if hasattr(hicache_storage.HiCacheStorage, "on_host_pools_registered"):  # from 0.5.23 on
            self.backend.on_host_pools_registered()
        controller = cache_controller.HiCacheController
        self._controller = controller.__new__(controller)  # its constructor needs a GPU
        vars(self._controller).update(
            page_size=PAGE,
            has_draft=False,
            host_memory_mode="cache",
            prefetch_sync_queue=queue.Queue(),
            storage_backend=self.backend,
            get_hash_str=_as_named,
            page_get_func=self._controller._page_get_zero_copy,
            page_set_func=self._controller._page_set_zero_copy,
        )

    def backup(self, hashes: Sequence[str], pages: Sequence[int]) -> int:
        """Stores pages as SGLang's backup thread does; returns how many it counts as stored."""
        operation = cache_controller.StorageOperation(
            indices_of(pages), [], hash_value=list(hashes)
        )
        self._controller._page_backup(operation)
        return operation.completed_tokens // PAGE

    def prefetch(self, hashes: Sequence[str], pages: Sequence[int]) -> int:
        """Asks for pages and loads them as SGLang's prefetch threads do; returns how many came."""
        operation = cache_controller.PrefetchOperation("request", list(hashes))
        operation.hash_value, _ = self._controller._storage_hit_query(operation)
        return self.transfer(operation, pages)

    def transfer(self, operation, pages: Sequence[int]) -> int:
        """Loads the pages that were found as SGLang's I/O thread does; returns how many came."""
        operation.host_indices = indices_of(pages)
        num_pages = self._controller._page_transfer(operation)  # from SGLang 0.5.19 on
        return operation.completed_tokens // PAGE if num_pages is None else num_pages

    def start(self) -> None:
        """Starts SGLang's own thread that asks for pages, one request after the other."""
        vars(self._controller).update(
            storage_stop_event=self._stop,
            prefetch_threshold=PAGE,
            prefetch_sync_groups=[],
            prefetch_hits_sync_groups=[],
            prefetch_queue=queue.Queue(),
            prefetch_hit_queue=queue.Queue(),
            prefetch_revoke_queue=queue.Queue(),
        )
        self._asking = threading.Thread(target=self._controller.prefetch_thread_func)
        self._asking.start()

    def ask(self, request: str, hashes: Sequence[str]) -> None:
        """Asks for pages as SGLang's scheduler does when a request arrives; returns at once."""
        self._controller.prefetch(request, list(hashes))

    def wait_for(self, request: str, hashes: Sequence[str]) -> None:
        """Asks for pages that are not stored; returns when the backend waits for them."""
        labels = {"verb": "match", "outcome": "ok"}

        def num_looks() -> float:
            metrics = self.backend.metrics.registry
            return metrics.get_sample_value("pdstore_store_calls_total", labels) or 0.0

        before = num_looks()
        self.start()
        self.ask(request, hashes)
        eventually(lambda: num_looks() >= before + 5)  # the first may be those of another thread

    def found(self) -> tuple[str, int]:
        """Waits for the next request of which pages are stored; returns it, and how many."""
        operation = self.hit()
        return operation.request_id, len(operation.hash_value)

    def hit(self):
        """Waits for the next request of which pages are stored; returns SGLang's operation.

        From SGLang 0.5.18 on its scheduler, and no thread before it, drops those without a page.
        """
        while True:
            operation = self._controller.prefetch_hit_queue.get(timeout=60)
            if operation.storage_hit_count >= PAGE:
                return operation
            self._controller.prefetch_revoke_queue.put(operation.request_id)

    def revoked(self) -> str:
        """Waits for the next request that SGLang computes, and returns it."""
        return self._controller.prefetch_revoke_queue.get(timeout=60)

    def page(self, number: int) -> bytes:
        """Returns the bytes of a page, in SGLang's own order."""
        return bytes(self.pool.get_data_page(number * PAGE).view(torch.uint8).numpy())

    def close(self) -> None:
        self._stop.set()
        if self._asking is not None:
            self._controller.prefetch_queue.put(None)
            self._asking.join(60)
        loading = getattr(self._controller, "prefetch_io_aux_thread", None)
        if loading is not None:  # up to SGLang 0.5.18 the thread that asks has started it
            self._controller.prefetch_buffer.put(None)
            loading.join(60)
        self.backend.close()
