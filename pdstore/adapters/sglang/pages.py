"""PagePool: finds, loads and saves pages of SGLang's host pools; reads which model SGLang serves.

The functions read the settings, and the model's dtype, weights and shape, from SGLang.
"""

# Decision: docs/decisions/034-sglang-pages.md
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pdstore.adapters.sglang.host_pools import DRAFTS, KV, VERSIONS, HostPages, ServedModel
from pdstore.adapters.sglang.page_wait import PageWait
from pdstore.adapters.sglang.sidecars import Restorable, Sidecar, SidecarLookup
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.keys import (
    HASH_BYTES,
    INDEXING,
    SHAPING,
    Namespace,
    PromptKeys,
    canonical,
    shaping,
)
from pdstore.format.weights import find_checkpoint, weights_revision
from pdstore.metrics import Metrics
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_engine_settings
from pdstore.status.server import Reporting
from pdstore.store.connect import connect_store
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

log = logging.getLogger(__name__)

_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size")
_PREFIXES_OF_SGLANG = ("prefetch_", "hicache_")
STATE_KERNELS = (
    *("mamba_backend", "linear_attn_backend"),
    *("linear_attn_prefill_backend", "linear_attn_decode_backend"),
)
"""SGLang's arguments about the kernels of Mamba states, which may order a state's bytes."""
DRAFT_ARGUMENTS = (
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_algorithm", "speculative_draft_model_quantization"),
    *("speculative_draft_kv_cache_dtype", "speculative_draft_attention_backend"),
)
"""SGLang's arguments about a draft model, which decide its KV."""
_FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def settings_of(extra_config: Mapping[str, Any]) -> Settings:
    """Returns the settings; `--hicache-storage-backend-extra-config` wins over the environment.

    Each key of that option is a setting in lower case without PDSTORE_, or SGLang's own option.
    Raises ConfigError.
    """
    given = {
        name: value
        for name, value in extra_config.items()
        if name not in _OF_SGLANG and not name.startswith(_PREFIXES_OF_SGLANG)
    }
    return read_engine_settings(**given)


def refuse_unsupported(storage_config: Any, args: Any) -> None:
    """Raises ConfigError, with the reason, for a server whose setup pdstore does not support."""
    refusals = {
        "pipeline parallelism": storage_config.pp_size > 1,
        "context parallelism of attention": storage_config.attn_cp_size > 1,
        "decode context parallelism": getattr(storage_config, "dcp_size", 1) > 1,
        "pages split by heads (tp_lcm_size)": storage_config.should_split_heads,
        "LoRA (no version's page hashes name the adapter's content)": _has_lora(args),
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise ConfigError(f"pdstore does not support {what} in SGLang: turn off one of the two")
    if not (storage_config.extra_config or {}).get("interface_v1"):
        raise ConfigError(
            'pdstore reads and writes pages in place: add "interface_v1": 1 to'
            " --hicache-storage-backend-extra-config"
        )


def _has_lora(args: Any) -> bool:
    """Returns True if the user or SGLang turned LoRA on: either is enough to refuse it."""
    typed = getattr(args, "typed", args)
    return any(
        getattr(each, name) for each in (typed, args) for name in ("enable_lora", "lora_paths")
    )


def warn_if_prefetch_skips_waiting(settings: Settings, args: Any) -> None:
    """Warns if SGLang's prefetch policy lets D compute a prompt that P is still storing."""
    policy = args.hicache_storage_prefetch_policy
    if settings.role == "decode" and policy != "wait_complete":
        log.warning(
            "--hicache-storage-prefetch-policy is %s: SGLang computes prompts that P is still"
            " storing. Start the decode server with wait_complete; pdstore limits the time of each"
            " wait",
            policy,
        )


class ServerArguments:
    """SGLang's arguments of one process, each as SGLang resolved it.

    Up to 0.5.18 SGLang writes what it resolves into its ServerArgs. From 0.5.19 on ServerArgs keeps
    what the user typed, and SGLang's `resolution_result` tells what the server uses.

    typed: SGLang's ServerArgs.
    Raises ConfigError if ServerArgs keeps what was typed, and this SGLang does not tell the rest.
    """

    def __init__(self, typed: Any) -> None:
        self.typed = typed
        try:
            from sglang.srt.arg_groups.overrides import resolution_result
        except ImportError as error:
            if hasattr(typed, "_raw_input"):
                raise ConfigError(
                    f"cannot tell how this SGLang resolved its arguments ({error}); pdstore"
                    f" supports {VERSIONS}"
                ) from error
            resolution_result = getattr
        self._resolve = resolution_result

    def __getattr__(self, name: str) -> Any:
        getattr(self.typed, name)  # raises AttributeError for a name that is no argument
        return self._resolve(self.typed, name)


def server_arguments() -> ServerArguments:
    """Returns the arguments of this process. Raises ConfigError if it has none."""
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot read this SGLang's arguments ({error}); pdstore supports {VERSIONS}"
        ) from error
    if args is None:
        raise ConfigError("SGLang's arguments are not published in this process")
    return ServerArguments(args)


def served_model(settings: Settings, args: Any, stored_as: torch.dtype) -> ServedModel:
    """Returns the model's fields of the namespace. Raises ConfigError if the user must set one.

    args: SGLang's arguments, as it resolved them.
    stored_as: the host pool's dtype, which is uint8 for every kind of fp8.
    """
    dtype = str(stored_as).removeprefix("torch.")
    if stored_as == torch.uint8:
        dtype = _FP8.get(args.kv_cache_dtype, "")
    if not dtype:
        raise ConfigError(
            f"the KV cache is kept as bytes and --kv-cache-dtype is {args.kv_cache_dtype}: set it"
            f" to {' or '.join(_FP8)}, so that pdstore knows the format of the bytes; it supports"
            " no other packed KV"
        )
    directory = find_checkpoint(args.model_path, args.revision)  # of a hub's name: its snapshot
    if directory is None:
        raise ConfigError(
            f"the checkpoint {args.model_path} is neither a directory nor in the hub's cache, so"
            " that its weights and its shape are not known: start SGLang with --model-path"
            " DIRECTORY"
        )
    if not settings.weights and args.load_format == "dummy":
        raise ConfigError("weights of load format dummy have no revision: set PDSTORE_WEIGHTS")
    scales = None
    if args.quantization_param_path is not None:
        scales = json.loads(Path(args.quantization_param_path).read_text())
    is_plain = args.quantization is None and scales is None
    return ServedModel(
        dtype,
        weights_revision(directory, settings),
        _rope(directory, args),
        None if is_plain else canonical([args.quantization, scales]),
        canonical([getattr(args, name, None) for name in STATE_KERNELS]),
    )


def served_draft(settings: Settings, args: Any) -> str:
    """Returns what names the draft model. Raises ConfigError if its checkpoint is not known.

    Layers that the model itself has for drafts (MTP) are in its own checkpoint.
    """
    given = {name: getattr(args, name, None) for name in DRAFT_ARGUMENTS}
    path, revision = given.pop(DRAFT_ARGUMENTS[0]), given.pop(DRAFT_ARGUMENTS[1])
    directory = find_checkpoint(path or args.model_path, revision if path else args.revision)
    if directory is None:
        raise ConfigError(
            f"the draft model {path} is neither a directory nor in the hub's cache, so that its"
            " weights are not known: start SGLang with --speculative-draft-model-path DIRECTORY"
        )
    weights = weights_revision(directory, settings)
    return canonical([weights, _rope(directory, args), args.kv_cache_dtype, given])


def _rope(directory: Path, args: Any) -> str:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model's configuration: {error}") from error
    config |= json.loads(args.json_model_override_args or "{}")
    text = config.get("text_config") or config
    fields = {name: text.get(name) for name in (*SHAPING, *INDEXING)}
    return shaping(fields, max_model_len=args.context_length or text.get("max_position_embeddings"))


_MAX_TIMEOUT_S = 3600.0  # lookups and jobs end sooner, at their own deadlines
_ROUTER_DUTY = "ask that instance for each prompt first"


class PagePool:
    """Finds, loads and saves the pages of one rank's host pools. Any thread may call it.

    It holds a PrefixCacheManager and, for each host pool, a KVPool, all over one store. Every call
    blocks until its work is done or its deadline has passed. Callers name pages by SGLang's hashes.
    They give the pages' places in a host pool by SGLang's indices, page by page.

    status_url: the URL of this rank's status page; None without PDSTORE_STATUS_PORT.
    pages: of each host pool by SGLang's name, from `pages_of`.
    weights: the weights' revision.
    rank: the number of this process among the processes with the same environment variables.
    Raises ConfigError, LayoutError or StoreError as `KVPool` does.
    """

    def __init__(
        self,
        settings: Settings,
        pages: Mapping[str, HostPages],
        weights: str,
        metrics: Metrics,
        rank: int = 0,
    ) -> None:
        self._pages: Mapping[str, HostPages] = {}
        self._namespaces: Mapping[str, Namespace] = {}
        self._pools: Mapping[str, KVPool] = {}
        self._settings = settings
        self._metrics = metrics
        self._weights = weights
        with contextlib.ExitStack() as undo:
            self._store = store = connect_store(settings, metrics)
            undo.callback(store.close)
            for name in pages:
                self._open(name, pages, undo)
            self.namespace = self._namespaces[KV]
            self._cache = PrefixCacheManager(
                settings, self.namespace, metrics=metrics, store=store, router_duty=_ROUTER_DUTY
            )
            undo.callback(self._cache.close)
            self._sidecars = SidecarLookup(store, metrics)
            undo.callback(self._sidecars.close)
            self._drafts = SidecarLookup(store, metrics)  # for the thread that loads
            undo.callback(self._drafts.close)
            self._wait = PageWait(settings, store, metrics) if settings.role == "decode" else None
            if self._wait is not None:
                undo.callback(self._wait.close)
            reporting = Reporting(
                settings, self._cache, [metrics.registry], lambda: self._problem, rank
            )
            undo.callback(reporting.close)
            self.status_url = reporting.url
            self._resources = undo.pop_all()

    def add(self, pools: Mapping[str, HostPages]) -> None:
        """Takes the pages of a draft model, which has come late. Raises as the constructor does.

        pools: of all host pools. The namespace is that of the model without a draft.
        """
        for name in pools.keys() - self._pages.keys():
            self._open(name, pools, self._resources)

    def num_stored(self, hashes: Sequence[str]) -> int:
        """Returns how many leading pages of KV are stored.

        With PDSTORE_ROLE=decode it waits for pages that P is still storing (see `PageWait`), and
        counts the expected pages as stored.

        hashes: a batch of a prompt's pages; from SGLang 0.5.23 on, all pages of the prompt.
        """
        keys = self._keys(KV, hashes)
        if self._wait is not None and hashes:
            is_whole = len(hashes) > self._wait.batch_pages
            if self._wait.wait_for_pages(keys, is_whole=is_whole):
                return len(keys)
        return self._num_matched(keys)

    def restorable(self, hashes: Sequence[str], num_last: Mapping[str, int | None]) -> Restorable:
        """Returns after how many of a prompt's pages SGLang can go on with all of its host pools.

        With PDSTORE_ROLE=decode it waits for pages that P is still storing. P stores the KV of a
        page after all that is beside it. So if all pages of each pool are needed, expected pages
        count as stored. A state or a window may be missing: then it waits until P has stored all.
        A draft's pages count as stored: nothing depends on them, and `load` does without.

        hashes: of all pages of the prompt.
        num_last: by the name of each pool beside KV, how many of the last pages SGLang needs to go
          on; None for all pages.
        """
        keys = self._keys(KV, hashes)
        drafts = DRAFTS.intersection(num_last)
        num_last = {name: of for name, of in num_last.items() if name not in drafts}
        if self._wait is not None and hashes and self._wait.wait_for_pages(keys, is_whole=True):
            if all(number is None for number in num_last.values()):
                return Restorable([len(keys)], dict.fromkeys([KV, *num_last, *drafts], len(keys)))
            for _ in self._wait.page_counts(keys) or ():
                pass  # it ends when all pages are stored, or when no more are expected
        num_pages = self._num_matched(keys)
        if not num_pages:
            return Restorable()
        keys = keys.prefix(keys.end_of(num_pages))
        sidecars = [
            Sidecar(name, self._keys(name, hashes[:num_pages]), number)
            for name, number in num_last.items()
        ]
        found = Restorable([*range(1, num_pages + 1)])
        if sidecars:
            found = self._sidecars.find(keys, sidecars)
        found.by_pool.update(dict.fromkeys([KV, *drafts], num_pages))
        return found

    def load(self, hashes: Sequence[str], host_indices: torch.Tensor, pool: str = KV) -> int:
        """Loads stored pages into a host pool; returns how many leading pages were loaded.

        It loads expected pages of KV as soon as P has stored them. A draft's pages that were not
        loaded are zeroed, and count: SGLang would not go on with the model's own without them.
        """
        keys = self._keys(pool, hashes)
        numbers = self._pages[pool].numbers(host_indices, len(hashes))
        if pool in DRAFTS:
            self._load_draft(pool, keys, numbers)
            return len(numbers)
        done = 0
        by_tier: Counter[int] = Counter()
        for stop in self._stored(keys) if pool == KV else (len(keys),):
            job = self._pools[pool].load(self._keys(pool, hashes[done:stop]), numbers[done:stop])
            done += self._num_pages(job)
            by_tier.update(job.by_tier)
            if done < stop:
                break
        if pool == KV:
            self._cache.note_load(done * self.namespace.block_tokens, 0, by_tier)
        return done

    def save(self, hashes: Sequence[str], host_indices: torch.Tensor, pool: str = KV) -> int:
        """Stores pages of a host pool; returns how many leading pages can be loaded now.

        A draft's pages that `load` has zeroed are left out, or no draft would ever be stored there.
        """
        pages = self._pages[pool]
        numbers = pages.numbers(host_indices, len(hashes))
        if pool not in DRAFTS:
            return self._num_pages(self._pools[pool].save(self._keys(pool, hashes), numbers))
        filled = [at for at, number in enumerate(numbers) if _is_filled(pages, number)]
        keys = self._keys(pool, [hashes[at] for at in filled])
        done = self._num_pages(self._pools[pool].save(keys, [numbers[at] for at in filled]))
        return len(hashes) if done == len(filled) else filled[done]

    def clear(self) -> bool:
        """Forgets all values of this namespace; returns False if the store fails."""
        return self._cache.clear()

    def close(self) -> None:
        """Ends running jobs and closes the connections. A second call does nothing."""
        self._resources.close()

    def _open(self, name: str, pools: Mapping[str, HostPages], undo: contextlib.ExitStack) -> None:
        pages = pools[name]
        namespace = pages.identity.namespace(self._settings, weights=self._weights)
        # a rank looks up its own shard; SGLang combines the answers of all ranks
        namespace = replace(namespace, parts=pages.layout.owned_parts)
        pool = KVPool(
            self._settings,
            pages.layout,
            pages.caches,
            namespace,
            metrics=self._metrics,
            store=self._store,
        )
        undo.callback(pool.close)
        # other threads go over them
        self._pages = {**self._pages, name: pages}
        self._namespaces = {**self._namespaces, name: namespace}
        self._pools = {**self._pools, name: pool}

    def _load_draft(self, pool: str, keys: PromptKeys, numbers: Sequence[int]) -> None:
        """Loads the leading pages of a draft that are stored, and zeroes the others."""
        found = self._drafts.find(keys, [Sidecar(pool, keys, None)]).lengths if numbers else []
        done = 0
        if found:
            stored = keys.prefix(keys.end_of(found[-1]))
            done = self._num_pages(self._pools[pool].load(stored, numbers[: found[-1]]))
        for cache in self._pages[pool].caches:
            cache[list(numbers[done:])] = 0
        num_cold = (len(numbers) - done) * self.namespace.block_tokens
        self._metrics.tokens.labels("cold").inc(num_cold)

    @property
    def _problem(self) -> str | None:
        return next((pool.problem for pool in self._pools.values() if pool.problem), None)

    def _num_matched(self, keys: PromptKeys) -> int:
        return len(self._cache.lookup(keys).wait(_MAX_TIMEOUT_S).keys)

    def _stored(self, keys: PromptKeys) -> Iterator[int]:
        """Yields how many leading pages can be loaded, each time that this number grows."""
        counts = self._wait.page_counts(keys) if self._wait is not None and len(keys) else None
        if counts is None:
            yield len(keys)
        else:
            yield from counts
            self._cache.lookup(keys)  # only to count hits and misses: nobody waits for it

    def _keys(self, pool: str, hashes: Sequence[str]) -> PromptKeys:
        """Returns the keys of pages. hashes: each covers a page and all pages before it.

        Raises LayoutError for a host pool that was not there at the start.
        """
        namespace = self._namespaces.get(pool)
        if namespace is None:
            raise LayoutError(f"there was no host pool {pool} when the storage backend started")
        digest = namespace.digest
        names = [hashlib.sha256(digest + each.encode()).digest()[:HASH_BYTES] for each in hashes]
        return PromptKeys.named(namespace, names)

    def _num_pages(self, job: Job) -> int:
        return job.wait(_MAX_TIMEOUT_S).num_tokens // self.namespace.block_tokens


def _is_filled(pages: HostPages, number: int) -> bool:
    """Returns whether a page has any byte other than 0."""
    return any(bool(cache[number].any()) for cache in pages.caches)
