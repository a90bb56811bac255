"""pdstore as an L2 adapter of LMCache's server.

LMCache finds it by `--l2-adapter` with the type "plugin", this package as `module_path` and
PDStoreL2Adapter as `class_name`.
"""

# Decision: docs/decisions/035-lmcache-sets.md
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstore_lmcache.l2_adapter import PDStoreL2Adapter

__all__ = ["PDStoreL2Adapter"]


def __getattr__(name: str) -> object:
    """Imports the adapter at its first use, because it imports LMCache."""
    if name != "PDStoreL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdstore_lmcache.l2_adapter import PDStoreL2Adapter

    return PDStoreL2Adapter
