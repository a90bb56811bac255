"""pdstore as a storage backend of SGLang's HiCache.

SGLang loads it by `--hicache-storage-backend dynamic` if `--hicache-storage-backend-extra-config`
names this package as `module_path` and PDStoreHiCache as `class_name`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstore.adapters.sglang.backend import PDStoreHiCache

__all__ = ["PDStoreHiCache"]


def __getattr__(name: str) -> object:
    """Imports the backend's module only at its first use, because that imports SGLang."""
    if name != "PDStoreHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdstore.adapters.sglang.backend import PDStoreHiCache

    return PDStoreHiCache
