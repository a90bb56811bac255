"""vLLM's block tables, with the layers' states in them; what differs by vLLM's version is here."""

# Decision: docs/decisions/046-states.md
from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from pdstore.format.continuation import NO_BLOCK

FAILS_WHOLE_LOADS = hasattr(base, "KVConnectorTransferResults")
"""True if this vLLM can be told that a load failed as a whole: from 0.30 on."""

_NULL_BLOCK = 0
"""vLLM's own NO_BLOCK."""

BlockIds = Sequence[Sequence[int]]
"""vLLM's block tables of a request: for each KV group the ids of its blocks, in token order."""

Tables = list["array[int] | dict[int, int]"]
"""A request's block ids for `KVPool`: for each KV group an array in token order. For a group of
states, a dict that leads from numbers of tokens to the block with the state after so many."""

States = Mapping[int, Mapping[int, int]]
"""By a number of tokens: the block with the state after so many, for each table of states."""


def specs_of(group: Any) -> dict[str, KVCacheSpec]:
    """Returns what vLLM says of each layer of a KV group."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: by_layer.get(name, group.kv_cache_spec) for name in group.layer_names}


def specs_of_model(kv_cache_config: Any) -> list[tuple[int, str | None, KVCacheSpec]]:
    """Returns what vLLM says of a model's layers: for each its KV group, its name and its spec.

    Of a group that has no layer on this rank's stage of a pipeline, vLLM says all the same what its
    layers are; their names are None here.
    """
    described: list[tuple[int, str | None, KVCacheSpec]] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        elsewhere = getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()
        described += [(number, name, spec) for name, spec in specs_of(group).items()] or [
            (number, None, spec) for spec in [*elsewhere] or [group.kv_cache_spec]
        ]
    return described


def is_state(spec: Any) -> bool:
    """Returns True for a layer with one state for a whole prefix: Mamba, GDN, KDA, short conv."""
    return isinstance(spec, MambaSpec)


def order_of_states() -> str:
    """Returns vLLM's name of the order of the elements in the state of a convolution."""
    from vllm.model_executor.layers.mamba import mamba_utils  # not in all versions

    return str(mamba_utils.get_conv_state_layout())


@dataclass(frozen=True)
class StateTables:
    """The block tables whose blocks hold states. Without states there are none.

    numbers: the KV groups of layers with states.
    entry_tokens: the tokens between two entries of such a table. It is as long as the longest
      prompt if prefix caching is off: then each request has one state, which each step overwrites.
    keeps_ends: True if a state that a step leaves at an entry's end is not overwritten by the next
      step, which begins with a copy of it (vLLM's mode `align`).
    num_drafts: the tokens that a step may draft. A table then ends with as many entries of scratch
      memory, one for the state after each drafted token. vLLM moves their blocks to other entries,
      and ends if anyone else holds one, so they are never saved.
    """

    numbers: frozenset[int] = frozenset()
    entry_tokens: int = 1
    keeps_ends: bool = False
    num_drafts: int = 0

    @classmethod
    def of(cls, kv_cache_config: Any) -> StateTables:
        """Returns those of a model: they are the same on each stage of a pipeline."""
        described = specs_of_model(kv_cache_config)
        specs = {number: spec for number, _, spec in described if is_state(spec)}
        if not specs:
            return cls()
        spec = next(iter(specs.values()))
        return cls(
            frozenset(specs),
            spec.block_size,
            spec.mamba_cache_mode == "align",
            max(each.num_speculative_blocks for each in specs.values()),
        )

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def token_table(self, ids: BlockIds) -> Sequence[int]:
        """Returns the first of a request's tables that is not one of states."""
        return next(table for number, table in enumerate(ids) if number not in self.numbers)

    def at(self, ids: BlockIds, end: int) -> Mapping[int, int]:
        """Returns the blocks that a step up to `end` tokens leaves the states in, by table.

        If the last of these tokens are drafts, the state there is the one before all drafts. Empty
        if one of the tables has no such block.
        """
        entry = (end - 1) // self.entry_tokens
        blocks = {n: ids[n][entry] for n in self.numbers if 0 <= entry < len(ids[n])}
        return blocks if self._is_whole(blocks) else {}

    def whole(self, named: States) -> dict[int, Mapping[int, int]]:
        """Returns those of the states that vLLM names of which it names all tables' blocks."""
        return {end: blocks for end, blocks in named.items() if self._is_whole(blocks)}

    def kept_by(
        self, named: States, ids: BlockIds, stop: int, num_drafts: int, *, is_last: bool
    ) -> States:
        """Returns the states that a step computes, and that later steps do not overwrite.

        No checksum finds a state that was overwritten while a save read it. So nothing else may be
        saved: not a state inside an entry, and no entry that is only a step's scratch memory.

        named: what vLLM says that it keeps, as `StepTables.named` returns it.
        ids: the request's tables in this step. stop: the tokens that have KV after this step.
        num_drafts: how many tokens the step computes behind them. vLLM adds some that it rejects to
          the last token of a prompt whose other tokens are loaded or cached. Then the states are
          those of the entry that the drafts end in. vLLM copies them to their own entry only after
          the step, and takes that block for drafts later.
        is_last: True if the request computes nothing after this step.
        """
        if num_drafts:
            blocks = self.at(ids, stop + num_drafts) if is_last else {}
            return {stop: blocks} if blocks else {}
        kept = self.whole(named)
        is_end = self.keeps_ends and stop % self.entry_tokens == 0
        if (is_end or is_last) and stop not in kept and (blocks := self.at(ids, stop)):
            kept[stop] = blocks
        return kept

    def message(self, ids: BlockIds, num_blocks: int, states: States | None = None) -> Tables:
        """Returns the first `num_blocks` ids of each of vLLM's tables, and these states."""
        ends = (states or {}).items()
        return [
            {end: blocks[number] for end, blocks in ends}
            if number in self.numbers
            else array("q", [NO_BLOCK if id == _NULL_BLOCK else id for id in table[:num_blocks]])
            for number, table in enumerate(ids)
        ]

    def _is_whole(self, blocks: Mapping[int, int]) -> bool:
        return blocks.keys() == self.numbers and _NULL_BLOCK not in blocks.values()


def longest_of(output: Any) -> int:
    """Returns the tokens of the longest sequence after a step, from the step's SchedulerOutput."""
    cached = output.scheduled_cached_reqs
    computed: dict[str, int] = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    scheduled: Mapping[str, int] = output.num_scheduled_tokens
    return max(computed[request_id] + tokens for request_id, tokens in scheduled.items())


@dataclass(eq=False)
class StepTables:
    """The block tables of a step's requests, and the states in them that vLLM keeps.

    vLLM exposes its scheduler's tables from 0.30 on, with the states that it keeps. Earlier
    versions say only which blocks each step adds, so these are collected here. They do not say
    which blocks a window gives back, so such tables are right for one KV group without a window.
    0.29 exposes tables as well, but only of the requests to which a step adds blocks.
    """

    _ids_of: Callable[[str], BlockIds | None] | None = field(init=False, default=None)
    _added: dict[str, list[list[int]]] = field(init=False, default_factory=dict)
    _named: Mapping[str, Iterable[tuple[int, int, int]]] = field(init=False, default_factory=dict)

    def read(self, output: Any) -> None:
        """Reads a step's SchedulerOutput."""
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None and hasattr(state, "get_block_ids"):
            self._ids_of = state.get_block_ids
            self._named = getattr(state, "boundary_state_offloads", None) or {}
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

    def ids(self, request_id: str) -> BlockIds | None:
        """Returns a request's tables in this step; None if vLLM tells of none."""
        return (self._ids_of or self._added.get)(request_id)

    def named(self, request_id: str) -> States:
        """Returns the states of a request that vLLM says, in this step, that it keeps."""
        states: dict[int, dict[int, int]] = {}
        for number, block, end in self._named.get(request_id, ()):
            states.setdefault(end, {})[number] = block
        return states

    @property
    def with_named_states(self) -> Iterable[str]:
        """The requests of whose states vLLM says, in this step, that it keeps some."""
        return self._named.keys()

    def forget(self, request_id: str) -> None:
        """Drops the tables of a request that has ended."""
        self._added.pop(request_id, None)
