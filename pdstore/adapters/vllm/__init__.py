"""pdstore as a KV connector of vLLM.

vLLM calls `plugin.register` through an entry point. `--kv-transfer-config` can also name this
package as `kv_connector_module_path`, with PDStoreConnector as `kv_connector`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstore.adapters.vllm.connector import PDStoreConnector

__all__ = ["PDStoreConnector"]


def __getattr__(name: str) -> object:
    """Imports the connector only at its first use: vLLM loads plugins before its own modules."""
    if name != "PDStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdstore.adapters.vllm.connector import PDStoreConnector

    return PDStoreConnector
