"""Messages between the connector's scheduler side and its worker side.

vLLM sends them, pickled, between processes of one instance, and never stores them. Block ids are
arrays of int64, with NO_BLOCK where vLLM has its block 0, which holds nothing; those of states are
dicts. `KVPool` keeps references to the arrays: do not change them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdstore.adapters.vllm.tables import StateTables, Tables
from pdstore.engine.job_end import JobEnd
from pdstore.errors import ConfigError
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import Namespace
from pdstore.format.plan import LoadPlan, SavePlan


@dataclass(frozen=True)
class LoadSpec:
    """One load into the blocks of `block_ids`.

    plan: None if nothing is to be loaded; all blocks of the load are then reported as not filled.
    num_left: tokens of the request that vLLM computes in the step behind the load.
    weights: `KnownWeights.generations` when it was planned; a rank that has others refuses it.
    number: always None, because only saves have numbers.
    """

    request_id: str
    plan: LoadPlan | None
    block_ids: Tables
    num_left: int = 1
    weights: Mapping[int, int] = field(default_factory=dict)
    number: None = None


@dataclass(frozen=True)
class SaveSpec:
    """One save from the blocks of `block_ids`.

    number: the name of the save in `StepReport`.
    weights: as in `LoadSpec`.
    """

    number: int
    request_id: str
    plan: SavePlan
    block_ids: Tables
    weights: Mapping[int, int] = field(default_factory=dict)


@dataclass
class PDStoreConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The work of one step, from the scheduler side to every worker.

    aborted_handoffs: hand-offs that P has announced and will not publish.
    step: the step's number.
    question: the number of the last question for the digest of each rank's weights.
    """

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    aborted_handoffs: list[HandoffId] = field(default_factory=list)
    step: int = 0
    question: int = 0


class RankWeights(NamedTuple):
    """State of one rank's weights, as it tells the scheduler.

    generation: how often they were written, as far as the rank has noticed.
    digest: of all weights; empty if they are those with which the rank began.
    since: the number of the step before which the rank noticed the last write.
    answered: the number of the scheduler's last question that the rank has answered.
    """

    generation: int = 0
    digest: bytes = b""
    since: int = 0
    answered: int = 0


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The outcome of work that ended since the last step, from a worker to the scheduler side.

    released: for each save's number, how many ranks no longer need the save's blocks.
    ended: for each load and save that ended, one entry for each rank on which it ended.
    weights: by rank, what ranks have to tell of their weights.
    """

    released: Counter[int] = field(default_factory=Counter)
    ended: list[JobEnd] = field(default_factory=list)
    weights: dict[int, RankWeights] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(
            self.released + other.released,
            self.ended + other.ended,
            self.weights | other.weights,
        )


@dataclass(frozen=True)
class RankLayout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The layout of one rank's KV cache, known as soon as vLLM has allocated the cache.

    block_tokens: tokens of one block in vLLM's block tables, but for those of states.
    states: the tables of states.
    """

    namespace: Namespace
    block_tokens: int
    states: StateTables = field(default_factory=StateTables)

    @staticmethod
    def common(ranks: Sequence[RankLayout]) -> RankLayout:
        """Returns the ranks' common layout. Raises ConfigError if they differ, or without ranks."""
        if not ranks:
            raise ConfigError(
                "no worker sent its layout: in MultiConnector list PDStoreConnector first"
            )
        first = ranks[0].namespace
        for rank in ranks[1:]:
            if rank.namespace.digest != first.digest:
                differences = "; ".join(first.differences(rank.namespace.described))
                raise ConfigError(f"the ranks of this instance differ in {differences}")
            if rank.states != ranks[0].states:
                raise ConfigError(
                    "the ranks of this instance keep states in unlike block tables:"
                    f" {ranks[0].states} and {rank.states}"
                )
        return ranks[0]
