"""Messages between the connector's scheduler side and its worker side.

vLLM pickles them between the processes of one instance; they are never stored or sent further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdstore.errors import ConfigError
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import BlockTables
from pdstore.format.namespace import Namespace
from pdstore.outcome import Direction, Reason


@dataclass(frozen=True)
class LoadSpec:
    """One load: the blocks that `keys` names, from `first_token` on, into the blocks of `tables`.

    num_tokens: leading tokens that vLLM counts on; a load that brings fewer has failed.
    keys: None for a load that can only be reported as failed.
    follow: the hand-off that P is still saving; the load follows it.
    """

    request_id: str
    keys: PromptKeys | None
    tables: BlockTables
    first_token: int
    num_tokens: int
    follow: HandoffId | None = None


@dataclass(frozen=True)
class SaveSpec:
    """One save: the blocks that `keys` names, from `first_token` on.

    number: names the save in `StepReport.released`.
    handoff: publish the whole prompt under this id when it is durable.
    """

    number: int
    request_id: str
    keys: PromptKeys
    tables: BlockTables
    first_token: int
    handoff: HandoffId | None = None


@dataclass
class PDStoreConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The work of one step, from the scheduler side to every worker.

    started_handoffs: hand-offs that D may follow from now on, with the tokens of the prompt.
    aborted_handoffs: hand-offs that will not come.
    """

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    started_handoffs: list[tuple[HandoffId, int]] = field(default_factory=list)
    aborted_handoffs: list[HandoffId] = field(default_factory=list)


class Interval(NamedTuple):
    """A time from its begin to its end, in seconds since the epoch."""

    begin_at: float
    end_at: float


@dataclass(frozen=True)
class EndedJob:
    """A load or a save that has ended on one rank.

    number: `SaveSpec.number`; None for a load.
    num_tokens, reason: as in `JobResult`.
    ran: from its start to its end.
    in_store: from its first call of the store to the end of the last, if it made one.
    """

    request_id: str
    number: int | None
    direction: Direction
    num_tokens: int
    reason: Reason | None
    ran: Interval
    in_store: Interval | None = None


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The outcome of work that ended since the last step, from a worker to the scheduler side.

    released: by the number of a save, how many ranks no longer need its blocks.
    failed: ids of requests whose load brought less than vLLM counts on, on any rank.
    loaded: by the id of a request, the tokens that its load brought, and the seconds that a rank
      worked on it; of several ranks, the slowest one's.
    ended: every load and save that has ended, of each rank.
    """

    released: Counter[int] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    loaded: dict[str, tuple[int, float]] = field(default_factory=dict)
    ended: list[EndedJob] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        loaded = {
            name: max(
                (report.loaded[name] for report in (self, other) if name in report.loaded),
                key=lambda load: load[1],
            )
            for name in {*self.loaded, *other.loaded}
        }
        return StepReport(
            self.released + other.released,
            self.failed | other.failed,
            loaded,
            self.ended + other.ended,
        )


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
                differences = "; ".join(first.differences(rank.namespace.describe()))
                raise ConfigError(f"the ranks of this instance differ in {differences}")
        return ranks[0]
