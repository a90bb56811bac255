"""self_test: saves a prompt in the store, loads it into other blocks, and compares every byte.

With PDSTORE_SELFTEST=1, an engine runs it at its start. `pdstore doctor` runs it as well.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from pdstore.errors import StoreError
from pdstore.format.continuation import BlockTable, BlockTables
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.connect import connect_store
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool
from pdstore.worker.swap.base import LayerCache

log = logging.getLogger(__name__)

_MARGIN_S = 60.0  # added to a job's timeout, for a slow machine
_MAX_ID = 1 << 15


class StepFailed(StoreError):
    """A step of the self-test went wrong.

    step: "connect", "save", "find", "load", "compare" or "remove".
    why: what went wrong, without the remedy.
    """

    def __init__(self, step: str, why: str, cause: BaseException | None = None) -> None:
        remedy = cause.remedy if isinstance(cause, StoreError) else ""
        self.step = step
        self.why = why.removesuffix(f"; {remedy}")
        super().__init__(f"the self-test's {step} failed: {self.why}", remedy=remedy)
        self.__cause__ = cause


class Tried(NamedTuple):
    """The result: a prompt was loaded exactly as it was saved. seconds: the time of each step."""

    num_bytes: int
    seconds: dict[str, float]


def self_test(
    settings: Settings,
    layout: Layout,
    kv_caches: Sequence[LayerCache],
    *,
    num_tokens: int | None = None,
    store: Store | None = None,
) -> Tried:
    """Saves random KV, loads it into other blocks, and compares every byte of it.

    It uses the block copies, the staging and the store that an engine uses. But it does not touch
    the engine's KV cache: it makes a small cache on the same device, with the same memory order.
    The prompt has a namespace of its own, and is removed at the end.

    kv_caches: the engine's tensors, as `KVPool` takes them; they may have a single block.
    num_tokens: tokens of the prompt; None takes one block of the layout.
    store: an open store, which the caller closes; None opens the store at PDSTORE_STORE.
    Raises StepFailed; ConfigError and LayoutError as `KVPool` does.
    """
    settings = settings.model_copy(update={"publish": True})
    with contextlib.ExitStack() as stack:
        if store is None:
            store = connect_store(settings, Metrics())
            stack.callback(store.close)
        tried = _try(store, settings, layout, kv_caches, num_tokens or layout.block_tokens)
    log.info("self-test: a prompt of %d bytes came back byte for byte", tried.num_bytes)
    return tried


def _try(
    store: Store,
    settings: Settings,
    layout: Layout,
    kv_caches: Sequence[LayerCache],
    num_tokens: int,
) -> Tried:
    namespace = layout.namespace(settings, weights=f"selftest:{secrets.token_hex(8)}")
    keys = PromptKeys(namespace).extend([secrets.randbelow(_MAX_ID) for _ in range(num_tokens)])
    names = _names(layout, keys)
    here, there = (_tables(layout, num_tokens, turn) for turn in range(2))
    caches = [
        _random_like(cache, 2 * len(here[cells.table]))
        for cache, cells in zip(kv_caches, layout.geometry.caches.values(), strict=True)
    ]
    seconds: dict[str, float] = {}
    with _timed("connect", seconds):
        _expect("connect", store.match(names), 0)
    pool = KVPool(settings, layout, caches, namespace, store=store)
    try:
        pool.ready()
        with _timed("save", seconds):
            _finish("save", keys, pool.save(keys, here), settings.deadline_s)
        with _timed("find", seconds):
            _expect("find", store.match(names), len(names))
        for _ in range(2):  # the first load waits for new memory; only the second counts
            with _timed("load", seconds):
                _finish("load", keys, pool.load(keys, there), settings.deadline_s)
    finally:
        pool.close()
        with contextlib.suppress(StoreError):
            store.remove(names)
    saved, loaded = (_prompt_of(layout, caches, each, num_tokens) for each in (here, there))
    if not all(map(torch.equal, saved, loaded)):
        raise StepFailed("compare", "other bytes came back than were saved")
    with _timed("remove", seconds):
        _expect("remove", store.match(names), 0)
    return Tried(sum(part.numel() for part in saved), seconds)


def _names(layout: Layout, keys: PromptKeys) -> list[BlockKey]:
    """Returns the names of what this rank stores of the prompt; of states, only the last one."""
    states = [part for part in layout.owned_parts if part.group in keys.namespace.states]
    rest = [part for part in layout.owned_parts if part not in states]
    return keys.store_keys(rest) + keys.store_keys(states, len(keys) - 1)


def _tables(layout: Layout, num_tokens: int, turn: int) -> BlockTables:
    """Returns the prompt's block tables: of turn 0 the first entries of each cache, then others."""
    tables: list[BlockTable] = []
    for table in range(len(layout.geometry.tables)):
        if table in layout.continuation.states:
            tables.append({num_tokens: turn})
        else:
            count = layout.geometry.num_entries(table, num_tokens)
            tables.append(range(turn * count, (turn + 1) * count))
    return tables


@contextlib.contextmanager
def _timed(step: str, seconds: dict[str, float]) -> Iterator[None]:
    """Times a step; turns an error of the store into a StepFailed that names the step."""
    start = time.perf_counter()
    try:
        yield
    except StepFailed:
        raise
    except StoreError as error:
        raise StepFailed(step, str(error), error) from error
    seconds[step] = time.perf_counter() - start


def _expect(step: str, num_found: int, num_right: int) -> None:
    if num_found != num_right:
        raise StepFailed(step, f"{num_found} values are there, and {num_right} should be")


def _finish(step: str, keys: PromptKeys, job: Job, deadline_s: float) -> None:
    result = job.wait(deadline_s + _MARGIN_S)
    if result.num_tokens != keys.num_tokens:
        why = f"{result.num_tokens} of {keys.num_tokens} tokens"
        why += f" ({result.reason.value if result.reason else 'unknown'})"
        raise StepFailed(step, f"{why}: {result.error}" if result.error else why, result.error)


def _prompt_of(
    layout: Layout, caches: Sequence[LayerCache], tables: BlockTables, num_tokens: int
) -> list[torch.Tensor]:
    """Returns the bytes of the prompt's tokens, or of its pages or its state, in each tensor."""
    held = []
    for cache, cells in zip(caches, layout.geometry.caches.values(), strict=True):
        table = tables[cells.table]
        ids = list(table.values() if isinstance(table, Mapping) else table)
        for tensor in cache if isinstance(cache, tuple) else (cache,):
            blocks = tensor[ids]
            held.append(blocks if cells.dtype is None else blocks.flatten(0, 1)[:num_tokens])
    return [each.contiguous().view(torch.uint8) for each in held]  # as bytes: NaN != NaN


def _random_like(cache: LayerCache, num_blocks: int) -> LayerCache:
    """Returns random blocks whose dimensions lie in memory in the same order as the cache's."""
    if isinstance(cache, tuple):
        return tuple(_random_tensor(tensor, num_blocks) for tensor in cache)
    return _random_tensor(cache, num_blocks)


def _random_tensor(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    outermost_first = sorted(range(cache.dim()), key=cache.stride, reverse=True)
    shape = (num_blocks, *cache.shape[1:])
    made = torch.empty_permuted(shape, outermost_first, dtype=cache.dtype, device=cache.device)
    return made.copy_(torch.randn(shape, device=cache.device))
