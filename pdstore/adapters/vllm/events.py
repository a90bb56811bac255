"""PoolEvents: vLLM's KV events of the blocks that the pool has."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from pdstore.adapters.vllm.messages import SaveSpec
from pdstore.engine.request import JobEnd

MEDIUM = "STORAGE"
_MOST_HASHES = 1 << 18  # hashes that are remembered


@dataclass
class _Request:
    """A request of vLLM's, and what of its prompt is durable.

    reached: leading tokens that are durable, as far as was told; None before its first save.
    saves: by number, the first token of each save that runs, and the tokens of each rank so far.
    ended: first and last token of saves that have ended behind a gap.
    is_finished: vLLM has forgotten the request.
    """

    request: Any
    reached: int | None = None
    saves: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    ended: list[tuple[int, int]] = field(default_factory=list)
    is_finished: bool = False


@dataclass(eq=False)
class PoolEvents:
    """Makes vLLM's events of blocks that all ranks have stored durably.

    An event names blocks as vLLM does: its own hash of each of its blocks. Only blocks of whole
    stored blocks are told, because a tail serves no other prompt. Of requests that were not added
    nothing is told. Only the scheduler's thread calls it.

    num_ranks: that save each block.
    engine_block_tokens, block_tokens: tokens of a block of vLLM's, and of a stored one.
    """

    num_ranks: int
    engine_block_tokens: int = 1
    block_tokens: int = 1

    def __post_init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._published: OrderedDict[Any, None] = OrderedDict()
        self._events: list[Any] = []

    def add(self, request: Any) -> None:
        """Adds a request."""
        self._requests[request.request_id] = _Request(request)

    def forget_request(self, request_id: str) -> None:
        """Forgets a request when its saves have ended."""
        known = self._requests.get(request_id)
        if known is not None:
            known.is_finished = True
            self._forget_if_over(request_id, known)

    def add_saves(self, saves: Sequence[SaveSpec]) -> None:
        """Adds saves that are about to begin."""
        for save in saves:
            known = self._requests.get(save.request_id)
            if known is None:
                continue
            first = save.plan.first_read
            known.reached = first if known.reached is None else min(known.reached, first)
            known.saves[save.number] = first, []

    def end_jobs(self, ends: Sequence[JobEnd]) -> None:
        """Counts jobs that have ended on some rank."""
        for job in ends:
            known = self._requests.get(job.request_id)
            if known is None or job.number not in known.saves:
                continue
            first, tokens = known.saves[job.number]
            tokens.append(job.num_tokens)
            if len(tokens) == self.num_ranks:
                del known.saves[job.number]
                known.ended.append((first, min(tokens)))
                self._publish(known)
                self._forget_if_over(job.request_id, known)

    def clear(self) -> None:
        """Withdraws what was published: the pool was cleared."""
        if self._published:
            self._events.append(BlockRemoved(block_hashes=list(self._published), medium=MEDIUM))
            self._published.clear()

    def pop(self) -> list[Any]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def _forget_if_over(self, request_id: str, known: _Request) -> None:
        if known.is_finished and not known.saves:
            del self._requests[request_id]

    def _publish(self, known: _Request) -> None:
        """Tells of the blocks that are durable now, as far as all before them are, too."""
        reached = start = known.reached or 0
        for first, end in sorted(known.ended):
            if first <= reached:
                reached = max(reached, end - end % self.block_tokens)
        known.reached = reached
        known.ended = [save for save in known.ended if save[0] > reached]
        step, hashes = self.engine_block_tokens, known.request.block_hashes
        if len(hashes) != known.request.num_tokens // step:
            return  # vLLM has no hashes, or not of these blocks
        blocks = range(start // step, reached // step)
        new = [number for number in blocks if self._is_new(hashes[number])]
        for _, run in itertools.groupby(enumerate(new), lambda each: each[1] - each[0]):
            self._events.append(self._stored(known.request, [number for _, number in run]))

    def _is_new(self, block_hash: Any) -> bool:
        name = maybe_convert_block_hash(block_hash)
        is_new = name not in self._published
        self._published[name] = None
        self._published.move_to_end(name)
        if len(self._published) > _MOST_HASHES:
            self._published.popitem(last=False)
        return is_new

    def _stored(self, request: Any, numbers: Sequence[int]) -> Any:
        """Returns the event of consecutive blocks of a request."""
        step, first, hashes = self.engine_block_tokens, numbers[0], request.block_hashes
        lora = request.lora_request
        extra_keys = [
            generate_block_hash_extra_keys(request, number * step, (number + 1) * step, 0)[0]
            for number in numbers
        ]
        untag = getattr(kv_cache_utils, "to_event_extra_keys", list)  # older versions have no tags
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[number]) for number in numbers],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * step : (numbers[-1] + 1) * step]),
            block_size=step,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
            extra_keys=list(untag(extra_keys)) if any(extra_keys) else None,
        )
