"""Messages between the connector's scheduler side and its worker side.

vLLM pickles them between the processes of one instance; they are never stored or sent further.
Block ids travel as arrays of int64; -1 stands for a block that a sliding window has left behind.
`KVPool` keeps references to the arrays: do not change them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdstore.engine.request import JobEnd, LoadPlan, SavePlan
from pdstore.errors import ConfigError
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import Namespace
from pdstore.format.layout import NO_BLOCK

NULL_BLOCK = 0
"""vLLM's block id for a place without a block, because the window has moved past its tokens."""

Tables = list["array[int]"]
"""Block ids of a request from its first token on: an array for each KV group."""


def tables_of(block_ids: Sequence[Sequence[int]], num_blocks: int) -> Tables:
    """Returns the first `num_blocks` of each of vLLM's block tables as KVPool reads them."""
    return [
        array("q", [NO_BLOCK if id == NULL_BLOCK else id for id in table[:num_blocks]])
        for table in block_ids
    ]


@dataclass(frozen=True)
class LoadSpec:
    """One load into the blocks of `block_ids`.

    plan: None for a load that loads nothing, and is reported as failed for all of its blocks.
    number: None; only saves have numbers.
    """

    request_id: str
    plan: LoadPlan | None
    block_ids: Tables
    number: None = None


@dataclass(frozen=True)
class SaveSpec:
    """One save from the blocks of `block_ids`.

    number: names the save in `StepReport`.
    """

    number: int
    request_id: str
    plan: SavePlan
    block_ids: Tables


@dataclass
class PDStoreConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The work of one step, from the scheduler side to every worker.

    aborted_handoffs: hand-offs that will not come.
    """

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    aborted_handoffs: list[HandoffId] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The outcome of work that ended since the last step, from a worker to the scheduler side.

    released: for each save's number, how many ranks no longer need the save's blocks.
    ended: the end of each load and save, one for each rank.
    """

    released: Counter[int] = field(default_factory=Counter)
    ended: list[JobEnd] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(self.released + other.released, self.ended + other.ended)


@dataclass(frozen=True)
class RankLayout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The layout of one rank's real KV cache, known once vLLM has allocated it.

    namespace: of that layout.
    block_tokens: tokens of one block in vLLM's block tables.
    """

    namespace: Namespace
    block_tokens: int

    @staticmethod
    def common(ranks: Sequence[RankLayout]) -> RankLayout:
        """Returns the layout of all ranks. Raises ConfigError if there are none or they differ."""
        if not ranks:
            raise ConfigError(
                "no worker sent its layout: in MultiConnector list PDStoreConnector first"
            )
        first = ranks[0].namespace
        for rank in ranks[1:]:
            if rank.namespace.digest != first.digest:
                differences = "; ".join(first.differences(rank.namespace.described))
                raise ConfigError(f"the ranks of this instance differ in {differences}")
        return ranks[0]
