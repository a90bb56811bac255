"""PagePool: finds, loads and saves the pages of SGLang's host pool; HostPages describes the pages.

The other functions read the settings, and the model's dtype, weights and shape, from SGLang.
"""

# Decision: docs/decisions/034-sglang-pages.md
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdstore.adapters.sglang.page_wait import PageWait
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.geometry import Geometry, PartGeometry
from pdstore.format.identity import Identity, LayerSpec
from pdstore.format.keys import HASH_BYTES, SHAPING, PromptKeys, canonical, shaping
from pdstore.format.layout import Layout
from pdstore.format.weights import find_checkpoint, weights_revision
from pdstore.metrics import Metrics
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_engine_settings
from pdstore.status.server import Reporting
from pdstore.store.connect import connect_store
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

log = logging.getLogger(__name__)

VERSIONS = "0.5.17 to 0.5.23"
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size")
_PREFIXES_OF_SGLANG = ("prefetch_", "hicache_")
_FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


class ServedModel(NamedTuple):
    """The fields of a namespace that cannot be read from the host pool.

    dtype: torch's name of the KV cache's element type.
    weights: the weights' revision.
    rope: as `Identity` takes it.
    quantization: SGLang's arguments about quantization and KV scales; None if none of them is set.
    """

    dtype: str
    weights: str
    rope: str
    quantization: str | None


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
    )


def _rope(directory: Path, args: Any) -> str:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model's configuration: {error}") from error
    config |= json.loads(args.json_model_override_args or "{}")
    text = config.get("text_config") or config
    fields = {name: text.get(name) for name in SHAPING}
    return shaping(fields, max_model_len=args.context_length or text.get("max_position_embeddings"))


_MAX_TIMEOUT_S = 3600.0  # lookups and jobs end sooner, at their own deadlines
_ROUTER_DUTY = "ask that instance for each prompt first"
_MHA = "MHATokenToKVPoolHost"
_MLA = "MLATokenToKVPoolHost"
_LAYOUTS = {
    _MHA: ("layer_first", "page_first", "page_first_direct", "page_head"),
    _MLA: ("layer_first", "page_first", "page_first_direct"),
}


@dataclass(frozen=True)
class HostPages:
    """The pages of one rank's host pool.

    A stored page has the bytes of the host pool: first those of K, then those of V; for MLA only
    those of the latents. A page needs one copy for K and one for V. In the layout `layer_first`, it
    needs one copy for each layer of K and one for each layer of V.

    layout: its namespace must be equal on P and D. Each contiguous piece of a page is a cell.
    caches: for each piece, a view of the host pool: [pages, bytes of the piece].
    """

    layout: Layout
    caches: list[torch.Tensor]

    @classmethod
    def of_host_pool(cls, pool: Any, served: ServedModel, tp_rank: int, tp_size: int) -> HostPages:
        """Returns the pages of SGLang's host pool. Raises ConfigError for an unsupported pool."""
        kind = type(pool).__name__
        if pool.layout not in _LAYOUTS.get(kind, ()):
            raise ConfigError(
                f"pdstore does not support the host pool {kind} with the layout {pool.layout}: of"
                f" SGLang {VERSIONS} it serves full attention and MLA, and for"
                f" --hicache-mem-layout {', '.join(_LAYOUTS[_MHA])}"
            )
        if kind == _MLA:  # every rank has all latents, and only one rank saves them
            tp_rank = 0
            tp_size = 1
            layer = LayerSpec.latent(pool.kv_cache_dim)
        else:
            layer = LayerSpec(pool.head_num * tp_size, pool.head_dim)
        halves = [pool.kv_buffer] if kind == _MLA else list(pool.kv_buffer)
        if pool.layout == "layer_first":
            halves = [each for half in halves for each in half]
        num_pages = pool.size // pool.page_size
        caches = [half.view(torch.uint8).view(num_pages, -1) for half in halves]
        identity = Identity(
            dtype=served.dtype,
            layers=(layer,) * pool.layer_num,
            block_tokens=pool.page_size,
            rope=served.rope,
            quantization=served.quantization,
            page=f"sglang:{pool.layout}",  # its name for the order of bytes in a page
            num_shards=tp_size,
        )
        by_layer = Layout(identity, pool.page_size, tp_rank, tp_size)
        return cls(replace(by_layer, given=_in_pieces(by_layer, len(caches))), caches)

    def numbers(self, host_indices: torch.Tensor, num_pages: int) -> list[int]:
        """Returns the pages' numbers. host_indices: the index of each of their tokens, in order.

        Raises LayoutError for tokens that are not `num_pages` whole pages.
        """
        tokens = self.layout.block_tokens
        firsts = host_indices[::tokens]
        if len(host_indices) != num_pages * tokens or bool((firsts % tokens).any()):
            raise LayoutError(f"{len(host_indices)} tokens are not {num_pages} pages of {tokens}")
        numbers: list[int] = (firsts // tokens).tolist()
        return numbers


def _in_pieces(layout: Layout, num_pieces: int) -> Geometry:
    """Returns what lies where in host pages that are equal pieces, one in each of several tensors.

    A payload is then the page as it lies in memory, with all layers and heads of this rank, piece
    after piece: so all layers are equal, in one layer range and one shard of this rank.
    """
    [(part, whole)] = layout.geometry.parts.items()
    piece = replace(
        whole.cache,
        cell_bytes=whole.payload_bytes(layout.block_tokens) // num_pieces,
        num_heads=1,
        dtype=None,
    )
    caches = dict.fromkeys(range(num_pieces), piece)
    parts = {part: PartGeometry(tuple(caches), piece, 0, 1)}
    return Geometry(layout.block_tokens, layout.geometry.tables, caches, parts)


class PagePool:
    """Finds, loads and saves the pages of one rank's host pool. Any thread may call it.

    It holds a PrefixCacheManager and a KVPool over one store. Every call blocks until its work is
    done or its deadline has passed. Callers name pages by SGLang's hashes. They give the
    pages' places in the host pool by SGLang's index of each token, page by page.

    status_url: the URL of this rank's status page; None without PDSTORE_STATUS_PORT.
    weights: the weights' revision.
    rank: the number of this process among the processes with the same environment variables.
    Raises ConfigError, LayoutError or StoreError as `KVPool` does.
    """

    def __init__(
        self, settings: Settings, pages: HostPages, weights: str, metrics: Metrics, rank: int = 0
    ) -> None:
        self._pages = pages
        namespace = pages.layout.namespace(settings, weights=weights)
        # a rank looks up its own shard; SGLang takes the smallest count of all ranks
        self.namespace = replace(namespace, parts=pages.layout.owned_parts)
        with contextlib.ExitStack() as undo:
            store = connect_store(settings, metrics)
            undo.callback(store.close)
            self._pool = KVPool(
                settings, pages.layout, pages.caches, self.namespace, metrics=metrics, store=store
            )
            undo.callback(self._pool.close)
            self._cache = PrefixCacheManager(
                settings, self.namespace, metrics=metrics, store=store, router_duty=_ROUTER_DUTY
            )
            undo.callback(self._cache.close)
            self._wait = PageWait(settings, store, metrics) if settings.role == "decode" else None
            if self._wait is not None:
                undo.callback(self._wait.close)
            reporting = Reporting(
                settings, self._cache, [metrics.registry], lambda: self._pool.problem, rank
            )
            undo.callback(reporting.close)
            self.status_url = reporting.url
            self._resources = undo.pop_all()

    def num_stored(self, hashes: Sequence[str]) -> int:
        """Returns how many leading pages are stored.

        With PDSTORE_ROLE=decode it waits for pages that P is still storing (see `PageWait`), and
        counts the expected pages as stored.
        """
        keys = self._keys(hashes)
        if self._wait is not None and hashes and self._wait.wait_for_pages(keys):
            return len(keys)
        return len(self._cache.lookup(keys).wait(_MAX_TIMEOUT_S).keys)

    def load(self, hashes: Sequence[str], host_indices: torch.Tensor) -> int:
        """Loads stored pages into the host pool; returns how many leading pages were loaded.

        It loads expected pages as soon as P has stored them.
        """
        numbers = self._pages.numbers(host_indices, len(hashes))
        keys = self._keys(hashes)
        done = 0
        for stop in self._stored(keys):
            job = self._pool.load(self._keys(hashes[done:stop]), numbers[done:stop])
            done += self._num_pages(job)
            if done < stop:
                break
        self._pool.metrics.tokens.labels("loaded").inc(done * self.namespace.block_tokens)
        return done

    def save(self, hashes: Sequence[str], host_indices: torch.Tensor) -> int:
        """Stores pages of the host pool; returns how many leading pages can be loaded now."""
        numbers = self._pages.numbers(host_indices, len(hashes))
        return self._num_pages(self._pool.save(self._keys(hashes), numbers))

    def clear(self) -> bool:
        """Forgets all values of this namespace; returns False if the store fails."""
        return self._cache.clear()

    def close(self) -> None:
        """Ends running jobs and closes the connections. A second call does nothing."""
        self._resources.close()

    def _stored(self, keys: PromptKeys) -> Iterator[int]:
        """Yields how many leading pages can be loaded, each time that this number grows."""
        counts = self._wait.page_counts(keys) if self._wait is not None and len(keys) else None
        if counts is None:
            yield len(keys)
        else:
            yield from counts
            self._cache.lookup(keys)  # only to count hits and misses: nobody waits for it

    def _keys(self, hashes: Sequence[str]) -> PromptKeys:
        """Returns the keys of pages. hashes: each covers a page and all pages before it."""
        digest = self.namespace.digest
        names = [hashlib.sha256(digest + each.encode()).digest()[:HASH_BYTES] for each in hashes]
        return PromptKeys.named(self.namespace, names)

    def _num_pages(self, job: Job) -> int:
        return job.wait(_MAX_TIMEOUT_S).num_tokens // self.namespace.block_tokens
