"""Saves: plans the saves of scheduled requests, and holds their blocks until they are read."""

# Decision: docs/decisions/031-vllm-block-references.md
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdstore.adapters.vllm.messages import SaveSpec
from pdstore.adapters.vllm.tables import BlockIds, States, StateTables, StepTables
from pdstore.engine.request import EngineRequest
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.keys import PromptKeys
from pdstore.format.plan import SavePlan


@dataclass(eq=False)
class Saves:
    """Plans the saves of scheduled requests. Only the scheduler's thread calls it.

    A save holds references to its blocks, so no step and no end of a request waits for it. Of
    states it holds only those that are to be saved: vLLM moves the other blocks of such a table.

    num_ranks: how many workers must release a save before its blocks are freed.
    block_pool: vLLM's BlockPool; nothing is saved while it is None.
    block_tokens: tokens of one block in vLLM's block tables, but for those of states.
    states: the tables of states.

    weights: `KnownWeights.generations`, for the saves.
    """

    num_ranks: int
    block_pool: Any = None
    block_tokens: int = 1
    states: StateTables = field(default_factory=StateTables)

    def __post_init__(self) -> None:
        self.weights: Mapping[int, int] = {}
        self._tables = StepTables()
        self._held: dict[int, tuple[list[Any], int]] = {}  # blocks; how many ranks need them
        self._num_saves = 0
        self._of_answers: dict[str, tuple[States, list[Any]]] = {}  # the last states; their blocks

    def __len__(self) -> int:
        """Returns how many saves hold blocks."""
        return len(self._held)

    def begin_step(self, output: Any) -> None:
        """Reads the block tables of a step's SchedulerOutput; call it before `plan`."""
        self._tables.read(output)
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            self._drop_answer_states(request_id)

    def plan(self, state: EngineRequest, request: Any, num_scheduled: int) -> list[SaveSpec]:
        """Returns, in a list, the save of what this step computes of a prompt, if there is one.

        request: vLLM's request. num_scheduled: how many of its tokens the step computes.
        """
        ids = self._tables.ids(state.id)
        if ids is None:
            return []
        start = request.num_computed_tokens
        end = start + num_scheduled
        stop = min(end, request.num_tokens)
        states: States = {}
        if self.states:
            hands_off = state.handoff is not None and request.max_tokens == 1
            is_last = hands_off and stop == request.num_tokens == state.keys.num_tokens
            named = self._tables.named(state.id)
            states = self.states.kept_by(named, ids, stop, end - stop, is_last=is_last)
        plan = state.plan_save(start, stop, states.keys())
        return self._hold(state.id, plan, ids, states)

    @property
    def with_named_states(self) -> Iterable[str]:
        """The requests of whose states vLLM says, in this step, that it keeps some."""
        return self._tables.with_named_states

    def hold_answer_states(self, request: Any) -> None:
        """Until a request ends, holds the last of the states in its answer that vLLM keeps.

        A request that was preempted gets none: its blocks may just be those that it lacked.
        """
        named = self.states.whole(self._tables.named(request.request_id))
        end = max((end for end in named if end % self.states.entry_tokens == 0), default=0)
        if not end or request.num_preemptions or self.block_pool is None:
            return
        self._drop_answer_states(request.request_id)
        blocks = [self.block_pool.blocks[id] for id in named[end].values()]
        self.block_pool.touch(blocks)
        self._of_answers[request.request_id] = {end: named[end]}, blocks

    def plan_answer(self, state: EngineRequest, request: Any, ids: BlockIds) -> list[SaveSpec]:
        """Returns, in a list, the save of a request's answer, which has ended, if there is one.

        ids: the request's block tables. With states, only that part of an answer is saved after
        which vLLM has kept a state.
        """
        stop = min(request.num_computed_tokens, request.num_tokens - 1)  # the last: no KV
        states: States = {}
        if self.states:
            held, _ = self._of_answers.get(state.id, ({}, []))
            states = {end: blocks for end, blocks in held.items() if end <= stop}
            stop = max(states, default=0)
        plan = state.plan_answer_save(stop, request.all_token_ids)
        return self._hold(state.id, plan, ids, states)

    @property
    def is_cache_empty(self) -> bool:
        """True if vLLM's own prefix cache has no block."""
        cached = getattr(self.block_pool, "cached_block_hash_to_block", None)
        return cached is not None and len(cached) == 0

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request that has ended."""
        self._tables.forget(request_id)
        self._drop_answer_states(request_id)

    def release_blocks(self, released: Mapping[int, int]) -> None:
        """Frees the blocks of saves that no rank needs any more. released: as in `StepReport`."""
        for number, count in released.items():
            blocks, num_ranks = self._held.pop(number, ([], 0))
            if num_ranks > count:
                self._held[number] = blocks, num_ranks - count
            elif blocks:
                self.block_pool.free_blocks(reversed(blocks))

    def _hold(
        self, request_id: str, plan: SavePlan | None, ids: BlockIds, states: States
    ) -> list[SaveSpec]:
        """Returns a planned save, in a list; its blocks are held from now on."""
        if plan is None or self.block_pool is None:
            return []
        keys = plan.keys
        first = plan.first_read // self.block_tokens
        end = -(-keys.num_tokens // self.block_tokens)
        states = {at: states[at] for at in states if plan.first_token < at and _names(keys, at)}
        tables = self.states.message(ids, end, states)
        held = dict.fromkeys(id for blocks in states.values() for id in blocks.values())
        for table in tables:
            if not isinstance(table, dict):
                held |= dict.fromkeys(id for id in table[first:] if id != NO_BLOCK)
        blocks = [self.block_pool.blocks[id] for id in held]
        self.block_pool.touch(blocks)
        self._num_saves += 1
        self._held[self._num_saves] = blocks, self.num_ranks
        return [SaveSpec(self._num_saves, request_id, plan, tables, self.weights)]

    def _drop_answer_states(self, request_id: str) -> None:
        _, blocks = self._of_answers.pop(request_id, ({}, []))
        if blocks:
            self.block_pool.free_blocks(reversed(blocks))


def _names(keys: PromptKeys, num_tokens: int) -> bool:
    """Returns whether keys have a name for the state after so many tokens."""
    is_end = num_tokens % keys.block_tokens == 0 or num_tokens == keys.num_tokens
    return is_end and num_tokens <= keys.num_tokens
