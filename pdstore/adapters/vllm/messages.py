"""What the scheduler's half and the workers' halves of the connector say to each other.

Each of them is pickled by vLLM between processes of one instance, never stored or sent further.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import BlockTables
from pdstore.format.namespace import Namespace


@dataclass(frozen=True)
class LoadSpec:
    """Load what `keys` names, from `first_token` on, into these blocks.

    num_tokens: leading tokens that vLLM counts on; fewer are a failure.
    keys: None if nothing can be loaded, and that must be said.
    """

    request_id: str
    keys: PromptKeys | None
    tables: BlockTables
    first_token: int
    num_tokens: int


@dataclass(frozen=True)
class SaveSpec:
    """Save what `keys` names, from `first_token` on; with an attempt, hand it over."""

    number: int
    request_id: str
    keys: PromptKeys
    tables: BlockTables
    first_token: int
    attempt: HandoffId | None = None


@dataclass
class PDStoreConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers have to do beside one step of the model."""

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    aborted_handoffs: list[HandoffId] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker has to say after a step.

    released: how many ranks need the blocks of a save no more, by the save's number.
    failed: requests of which not everything was loaded, on some rank.
    """

    released: Counter[int] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(self.released + other.released, self.failed | other.failed)


@dataclass(frozen=True)
class Registered(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker found when it was given the KV cache: what its real layout comes to.

    block_tokens: tokens of a block in vLLM's tables.
    """

    namespace: Namespace
    block_tokens: int
