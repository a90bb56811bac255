"""Saves: plans the saves of scheduled requests, and holds their blocks until they are read."""

# Decision: docs/decisions/031-vllm-block-references.md
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdstore.adapters.vllm.messages import SaveSpec, tables_of
from pdstore.engine.request import EngineRequest
from pdstore.format.continuation import NO_BLOCK, BlockTables
from pdstore.format.plan import SavePlan


@dataclass(eq=False)
class Saves:
    """Plans the saves of scheduled requests. Only the scheduler's thread calls it.

    A save holds references to its blocks, so no step and no end of a request waits for it.

    Block tables are read from vLLM's scheduler if it exposes them. vLLM 0.26 says only which blocks
    each step adds, so these are collected here. It does not say which blocks a window gives back,
    so such tables are right for one KV group without a sliding window.

    num_ranks: how many workers must release a save before its blocks are freed.
    block_pool: vLLM's BlockPool; nothing is saved while it is None.
    block_tokens: tokens of one block in vLLM's block tables.

    weights: `KnownWeights.generations`, for the saves.
    """

    num_ranks: int
    block_pool: Any = None
    block_tokens: int = 1

    def __post_init__(self) -> None:
        self.weights: Mapping[int, int] = {}
        self._ids_of: Callable[[str], BlockTables | None] | None = None
        self._added: dict[str, list[list[int]]] = {}
        self._held: dict[int, tuple[list[Any], int]] = {}  # blocks; how many ranks need them
        self._num_saves = 0

    def __len__(self) -> int:
        """Returns how many saves hold blocks."""
        return len(self._held)

    def begin_step(self, output: Any) -> None:
        """Reads the block tables of a step's SchedulerOutput; call it before `plan`."""
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:
            self._ids_of = state.get_block_ids
            return
        for new in output.scheduled_new_reqs:
            self._added[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._added[request_id] = [list(ids) for ids in added]
            elif added is not None:
                for table, ids in zip(self._added[request_id], added, strict=True):
                    table.extend(ids)

    def plan(self, state: EngineRequest, request: Any, num_scheduled: int) -> list[SaveSpec]:
        """Returns, in a list, the save of what this step computes of a prompt, if there is one.

        request: vLLM's request. num_scheduled: how many of its tokens the step computes.
        """
        block_ids = (self._ids_of or self._added.get)(state.id)
        if block_ids is None:
            return []
        start = request.num_computed_tokens
        plan = state.plan_save(start, min(start + num_scheduled, request.num_tokens))
        return self.held(state.id, plan, block_ids)

    def held(self, request_id: str, plan: SavePlan | None, ids: BlockTables) -> list[SaveSpec]:
        """Returns a planned save, in a list; its blocks are held from now on."""
        if plan is None or self.block_pool is None:
            return []
        first = plan.first_read // self.block_tokens
        end = -(-plan.keys.num_tokens // self.block_tokens)
        tables = tables_of(ids, end)
        held = dict.fromkeys(id for table in tables for id in table[first:] if id != NO_BLOCK)
        blocks = [self.block_pool.blocks[id] for id in held]
        self.block_pool.touch(blocks)
        self._num_saves += 1
        self._held[self._num_saves] = blocks, self.num_ranks
        return [SaveSpec(self._num_saves, request_id, plan, tables, self.weights)]

    @property
    def is_cache_empty(self) -> bool:
        """True if vLLM's own prefix cache has no block."""
        cached = getattr(self.block_pool, "cached_block_hash_to_block", None)
        return cached is not None and len(cached) == 0

    def forget_tables(self, request_id: str) -> None:
        """Drops the block tables of a request that has ended."""
        self._added.pop(request_id, None)

    def release_blocks(self, released: Mapping[int, int]) -> None:
        """Frees the blocks of saves that no rank needs any more. released: as in `StepReport`."""
        for number, count in released.items():
            blocks, num_ranks = self._held.pop(number, ([], 0))
            if num_ranks > count:
                self._held[number] = blocks, num_ranks - count
            elif blocks:
                self.block_pool.free_blocks(reversed(blocks))
