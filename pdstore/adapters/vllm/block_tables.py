"""Tables: which blocks vLLM holds for a request now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdstore.format.layout import NO_BLOCK, BlockTables

NULL_BLOCK = 0
"""vLLM's id of a block that it does not hold: a window has moved on."""


class Tables:
    """Block tables by request, one list for each KV group.

    A vLLM that says what it holds is asked. An older one (0.26) says what it adds: that is
    followed, and is right for a single KV group only, because windows give blocks back unsaid.
    """

    def __init__(self) -> None:
        self._ask: Callable[[str], Sequence[Sequence[int]] | None] | None = None
        self._followed: dict[str, list[list[int]]] = {}

    def step(self, output: Any) -> None:
        """A step was scheduled."""
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:
            self._ask = state.get_block_ids
            return
        for new in output.scheduled_new_reqs:
            self._followed[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._followed[request_id] = [list(ids) for ids in added]
            elif added is not None:
                for table, ids in zip(self._followed[request_id], added, strict=True):
                    table.extend(ids)

    def of(self, request_id: str) -> Sequence[Sequence[int]] | None:
        """A scheduled request's tables, in the step that `step` was called for."""
        return self._ask(request_id) if self._ask else self._followed.get(request_id)

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)


def as_pdstores(block_ids: Sequence[Sequence[int]], num_blocks: int) -> BlockTables:
    """The first `num_blocks` of each table, in pdstore's words."""
    return [
        [NO_BLOCK if id == NULL_BLOCK else id for id in table[:num_blocks]] for table in block_ids
    ]
