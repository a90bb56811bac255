"""A storage-backed KV cache for prefill/decode disaggregated LLM inference.

cache = pdstore.PrefixCacheManager(settings, namespace)     # the scheduler's half
pool = pdstore.KVPool(settings, layout, kv_caches, namespace)   # the worker's half
"""

from pdstore.async_runner import AsyncRunner
from pdstore.errors import PDStoreError
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import MultimodalItem, PromptKeys
from pdstore.format.layer_spec import LayerSpec
from pdstore.format.layout import Layout
from pdstore.format.namespace import Namespace
from pdstore.format.weights import weights_revision
from pdstore.metrics import Metrics
from pdstore.outcome import JobResult, Reason
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots, Store
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

__version__ = "0.1.0"
__all__ = [
    "AsyncRunner",
    "Handoff",
    "HandoffId",
    "Job",
    "JobResult",
    "KVPool",
    "LayerSpec",
    "Layout",
    "Lookup",
    "Match",
    "Metrics",
    "MultimodalItem",
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
