"""RequestTables: the blocks that vLLM holds for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdstore.format.layout import NO_BLOCK, BlockTables

NULL_BLOCK = 0
"""vLLM's id where a request holds no block, because its window has moved past the tokens."""


class RequestTables:
    """The block tables of each scheduled request, one list for each KV group.

    Reads them from vLLM's scheduler where it exposes them. vLLM 0.26 exposes only the blocks that
    each step adds: these are accumulated here, which is right for a single KV group, because blocks
    that a sliding window gives back are not announced.
    """

    def __init__(self) -> None:
        self._ask: Callable[[str], Sequence[Sequence[int]] | None] | None = None
        self._added: dict[str, list[list[int]]] = {}

    def step(self, output: Any) -> None:
        """Takes up the blocks of a step that vLLM has just scheduled."""
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:
            self._ask = state.get_block_ids
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

    def of(self, request_id: str) -> Sequence[Sequence[int]] | None:
        """Returns the tables of a request of the current step; None for an unknown request."""
        return self._ask(request_id) if self._ask else self._added.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drops what was accumulated for a request that has ended."""
        self._added.pop(request_id, None)


def pool_tables(block_ids: Sequence[Sequence[int]], num_blocks: int) -> BlockTables:
    """The first `num_blocks` of each of vLLM's tables as KVPool takes them."""
    return [
        [NO_BLOCK if id == NULL_BLOCK else id for id in table[:num_blocks]] for table in block_ids
    ]
