"""Saves: what each step saves, and vLLM's blocks, which are held until that is read."""

# Decision: docs/decisions/031-vllm-block-references.md
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdstore.adapters.vllm.messages import NULL_BLOCK, SaveSpec, tables_of
from pdstore.engine.request import EngineRequest


class Saves:
    """Plans the saves of scheduled requests. Only the scheduler's thread calls it.

    A save holds references to its blocks, which outlive the request and delay no step.

    Block tables are read from vLLM's scheduler where it exposes them. vLLM 0.26 exposes only the
    blocks that each step adds: these are accumulated here, which is right for a single KV group,
    because blocks that a sliding window gives back are not announced.

    block_tokens: tokens of one block in vLLM's block tables.
    num_ranks: workers that must release a save before its blocks are freed.
    """

    def __init__(self, block_pool: Any, block_tokens: int, num_ranks: int) -> None:
        self._block_pool = block_pool
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        self._ids_of: Callable[[str], Sequence[Sequence[int]] | None] | None = None
        self._added: dict[str, list[list[int]]] = {}
        self._held: dict[int, tuple[list[Any], int]] = {}  # blocks, and ranks that read them
        self._numbers = itertools.count()

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
        """Returns the save of what this step computes of a request, if there is one.

        request: vLLM's. num_scheduled: the tokens of it that the step computes.
        """
        block_ids = (self._ids_of or self._added.get)(state.id)
        if block_ids is None:
            return []
        start, known = request.num_computed_tokens, request.num_tokens
        if start < state.keys.num_tokens:
            stop = min(start + num_scheduled, known)
        else:
            stop = min(start, known - 1)  # the last token has no KV yet, and drafts may be rejected
        plan = state.plan_save(start, stop, request.all_token_ids)
        if plan is None:
            return []
        first = plan.first_read // self._block_tokens
        end = -(-plan.keys.num_tokens // self._block_tokens)
        number = next(self._numbers)
        self._hold(number, (id for table in block_ids for id in table[first:end]))
        return [SaveSpec(number, state.id, plan, tables_of(block_ids, end))]

    def end_request(self, request_id: str) -> None:
        """Drops the block tables of a request that has ended."""
        self._added.pop(request_id, None)

    def release(self, released: Mapping[int, int]) -> None:
        """Counts the ranks that have read each save; the last one frees the save's blocks."""
        for number, count in released.items():
            held = self._held.pop(number, None)
            if held is None:
                continue
            blocks, left = held[0], held[1] - count
            if left > 0:
                self._held[number] = (blocks, left)
            else:
                self._block_pool.free_blocks(reversed(blocks))

    def _hold(self, number: int, ids: Any) -> None:
        blocks = [self._block_pool.blocks[id] for id in dict.fromkeys(ids) if id != NULL_BLOCK]
        self._block_pool.touch(blocks)
        self._held[number] = (blocks, self._num_ranks)
