"""vLLM with prompts that are computed in chosen chunks, to compare answers to the last bit.

The answers of a model with states depend on where its chunks end. ReplayScheduler logs the chunks
that instances compute, and computes a prompt in given ones: `--scheduler-cls`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pdstore.adapters.vllm.worker import PDStoreConnectorWorker
from pdstore.format.continuation import BlockTables
from pdstore.format.plan import LoadPlan
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

LOG = "CHUNK_LOG"
"""Names the file in the environment of the instances, who all may share one."""
REPLAY = "replay"
"""The name of a prompt's ends of chunks in its `kv_transfer_params`."""
_NUM_BLOCKS = 128  # of a tiny checkpoint's cache; vLLM gives block 0 to no request


class ReplayScheduler(Scheduler):
    """vLLM's scheduler, whose chunks of a prompt end where its request says."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._aligns = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = True  # so that vLLM asks about each chunk
        self._log = Path(os.environ.get(LOG, os.devnull))

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, local: int = 0, external: int = 0
    ) -> int:
        start = request.num_computed_tokens + local + external
        if ends := _ends_in(request):
            return min([end for end in ends if end > start] + [start + num_new_tokens]) - start
        if self._aligns:
            return super()._mamba_block_aligned_split(request, num_new_tokens, local, external)
        return num_new_tokens

    def schedule(self, *given: Any, **named: Any) -> Any:
        output = super().schedule(*given, **named)
        with self._log.open("a") as log:
            for name, count in output.num_scheduled_tokens.items():
                request = self.requests[name]
                stop = request.num_computed_tokens
                is_known = stop <= request.num_tokens  # else the last token is on its way
                if is_known and not _ends_in(request):
                    line = [_digest(request.all_token_ids[:stop]), stop - count]
                    print(json.dumps(line), file=log)
        return output


class AsyncReplayScheduler(ReplayScheduler, AsyncScheduler):
    """The same with asynchronous scheduling."""


def _ends_in(request: Any) -> list[int]:
    return (request.kv_transfer_params or {}).get(REPLAY) or []


def _digest(tokens: Sequence[int]) -> str:
    return sha256(repr(list(tokens)).encode()).hexdigest()


def ends_of(log: Path, tokens: Sequence[int]) -> list[int]:
    """Returns the ends of the last chunks, whoever computed them, that led to the last token."""
    starts = dict(json.loads(line) for line in log.read_text().splitlines())
    ends, stop = [], len(tokens)
    while stop:
        ends.append(stop)
        stop = starts[_digest(tokens[:stop])]
        assert stop < ends[-1], f"a chunk that ends at {ends[-1]} and begins at {stop}"
    return ends[::-1]


def load_without_states() -> None:
    """Makes each pool of this process load states to blocks of no request."""
    begin_load = KVPool.begin_load

    def without_states(pool: KVPool, plan: LoadPlan, block_ids: BlockTables, **more: Any) -> Job:
        used = {id for table in block_ids for id in _ids_in(table)}
        others = (id for id in range(1, _NUM_BLOCKS) if id not in used)
        tables = [
            {end: next(others) for end in table} if isinstance(table, Mapping) else table
            for table in block_ids
        ]
        return begin_load(pool, plan, tables, **more)

    KVPool.begin_load = without_states  # type: ignore[method-assign]


def load_without_pages() -> None:
    """Makes each instance of this process load the pages of indexers to copies that vLLM ignores.

    Its own pages keep what they have: zeros, or what earlier requests left.
    """
    register = PDStoreConnectorWorker.register

    def with_copies(worker: PDStoreConnectorWorker, kv_caches: Mapping[str, torch.Tensor]) -> None:
        copied = {
            name: cache.clone() if "indexer" in name.split(".") else cache
            for name, cache in kv_caches.items()
        }
        register(worker, copied)

    PDStoreConnectorWorker.register = with_copies  # type: ignore[method-assign]


def sort_what_indexers_choose() -> None:
    """Makes sparse attention of this process read the tokens that an indexer chose in one order.

    vLLM's kernel writes them in the order in which its threads find them, so sums over the same
    tokens differ in the last bits from one call to the next, and later layers choose other tokens.
    """
    module = importlib.import_module("vllm.models.deepseek_v32.attention")
    choose = module.sparse_attn_indexer

    @functools.wraps(choose)
    def sorted_choice(hidden_states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        chosen: torch.Tensor = choose(hidden_states, *given, **named)
        rows = chosen[: hidden_states.shape[0]]
        rows.copy_(rows.sort(descending=True).values)  # -1 means no token, and comes last
        return chosen

    module.sparse_attn_indexer = sorted_choice


def _ids_in(table: Sequence[int] | Mapping[int, int]) -> Iterable[int]:
    return table.values() if isinstance(table, Mapping) else table
