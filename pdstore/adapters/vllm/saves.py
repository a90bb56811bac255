"""SavePlanner: decides what each step saves, and holds the blocks until it is saved."""

from __future__ import annotations

import itertools
from typing import Any

from pdstore.adapters.vllm.block_refs import BlockRefs
from pdstore.adapters.vllm.block_tables import NULL_BLOCK, RequestTables, pool_tables
from pdstore.adapters.vllm.messages import SaveSpec
from pdstore.adapters.vllm.request import RequestTracker
from pdstore.format.keys import PromptKeys
from pdstore.settings import Settings


class SavePlanner:
    """Plans the saves of scheduled requests. Only the scheduler's thread calls it.

    refs: references to vLLM's blocks.
    block_tokens: tokens of one block in vLLM's block tables.
    """

    def __init__(self, settings: Settings, refs: BlockRefs, block_tokens: int) -> None:
        self._settings = settings
        self._refs = refs
        self._block_tokens = block_tokens
        self._tables = RequestTables()
        self._numbers = itertools.count()

    def step(self, output: Any) -> None:
        """Takes up the blocks of a step; call it before `plan`."""
        self._tables.step(output)

    def forget(self, request_id: str) -> None:
        """Drops the block tables of a request that has ended."""
        self._tables.forget(request_id)

    def plan(self, tracker: RequestTracker, num_scheduled: int) -> SaveSpec | None:
        """The save of what this step computes of a request; None if there is nothing new to save.

        num_scheduled: the tokens of the request that the step computes.
        """
        request = tracker.request
        computed, step = request.num_computed_tokens, tracker.keys.block_tokens
        if tracker.is_prompt_pending and self._settings.role != "decode":
            if tracker.handoff is not None and not tracker.num_saved:
                # In vLLM's prefix cache, so saved before; a hand-off checks that it still is.
                tracker.num_saved = computed - computed % step
            return self._save(tracker, tracker.keys.prefix(computed + num_scheduled))
        if self._settings.save_decoded:
            # The last known token has no KV yet; rejected draft tokens never count.
            end = min(computed, request.num_tokens - 1)
            if end // step > tracker.num_saved // step:
                return self._save(tracker, tracker.decoded_until(end))
        return None

    def _save(self, tracker: RequestTracker, keys: PromptKeys) -> SaveSpec | None:
        """Saves the new tokens of `keys`; publishes the hand-off with the prompt's last one."""
        is_end = tracker.is_prompt_pending and keys.num_tokens == tracker.keys.num_tokens
        handoff = tracker.handoff if is_end else None
        if keys.num_tokens <= tracker.num_saved and handoff is None:
            return None
        request_id = tracker.request.request_id
        block_ids = self._tables.of(request_id)
        if block_ids is None:
            return None
        end = -(-keys.num_tokens // self._block_tokens)
        first_token = min(tracker.num_saved, keys.num_tokens)
        number = next(self._numbers)
        # A hand-off may save any block of the prompt again, if the store has lost it.
        first = 0 if handoff else first_token // keys.block_tokens * keys.block_tokens
        held = (id for table in block_ids for id in table[first // self._block_tokens : end])
        self._refs.hold(number, (id for id in held if id != NULL_BLOCK))
        tracker.num_saved = max(tracker.num_saved, keys.num_tokens)
        tracker.is_announced |= handoff is not None
        tables = pool_tables(block_ids, end)
        return SaveSpec(number, request_id, keys, tables, first_token, handoff)
