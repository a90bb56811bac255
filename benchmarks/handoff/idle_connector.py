"""IdleConnector: does nothing, to time what vLLM does for any connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Finds nothing, loads nothing and saves nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None
