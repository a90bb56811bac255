"""A storage-backed KV cache for prefill/decode disaggregated LLM inference.

cache = pdstore.PrefixCacheManager(settings, namespace)     # the scheduler's half
pool = pdstore.KVPool(settings, layout, kv_caches, namespace)   # the worker's half
"""

from pdstore.async_runner import AsyncRunner
from pdstore.errors import PDStoreError
from pdstore.handoff import Attempt, Handoff
from pdstore.job import Job
from pdstore.keys import Item, Namespace, PromptKeys
from pdstore.layout import LayerSpec, Layout
from pdstore.lookup import Lookup, Match
from pdstore.metrics import Metrics
from pdstore.pool import KVPool
from pdstore.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_settings
from pdstore.store import open_store
from pdstore.store.base import Store
from pdstore.types import JobResult, Reason, Slots
from pdstore.weights import weights_revision

__all__ = [
    "AsyncRunner",
    "Attempt",
    "Handoff",
    "Item",
    "Job",
    "JobResult",
    "KVPool",
    "LayerSpec",
    "Layout",
    "Lookup",
    "Match",
    "Metrics",
    "Namespace",
    "PDStoreError",
    "PrefixCacheManager",
    "PromptKeys",
    "Reason",
    "Settings",
    "Slots",
    "Store",
    "open_store",
    "read_settings",
    "weights_revision",
]
