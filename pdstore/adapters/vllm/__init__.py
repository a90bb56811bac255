"""pdstore as a KV connector of vLLM.

`plugin` is what vLLM's entry point calls. `--kv-transfer-config` may also name this module as
`kv_connector_module_path`, with `kv_connector` PDStoreConnector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstore.adapters.vllm.connector import PDStoreConnector

__all__ = ["PDStoreConnector"]


def __getattr__(name: str) -> object:
    """Imports the connector when it is asked for: vLLM loads plugins before its own modules."""
    if name != "PDStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdstore.adapters.vllm.connector import PDStoreConnector

    return PDStoreConnector
