"""A storage-backed KV cache for prefill/decode disaggregated LLM inference.

    cache = pdstore.PrefixCacheManager(settings, namespace)         # in the scheduler's process
    pool = pdstore.KVPool(settings, layout, kv_caches, namespace)   # in each worker's process

`open_swap` needs no pool: what it returns copies blocks between a paged cache and host memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstore.public import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """Imports all public names when one of them is first used, so that `import pdstore` is quick.

    Raises AttributeError.
    """
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = vars(importlib.import_module("pdstore.public"))
    names: list[str] = public["__all__"]
    globals().update({each: public[each] for each in (*names, "__all__")})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("pdstore.public").__all__})
