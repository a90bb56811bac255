"""Every name that `import pdstore` offers."""

from pdstore.async_runner import AsyncRunner
from pdstore.errors import (
    ConfigError,
    DeviceError,
    JobError,
    LayoutError,
    PDStoreError,
    SaveFailed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    SwapError,
)
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import NO_BLOCK, LayerSpec, Layout, Pipeline
from pdstore.format.multimodal import MultimodalItem
from pdstore.format.namespace import Namespace
from pdstore.format.weights import weights_revision
from pdstore.metrics import Metrics
from pdstore.outcome import Direction, JobResult, Reason
from pdstore.scheduler.break_even import BreakEven, Decision, Outcome
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_settings
from pdstore.store import open_store
from pdstore.store.base import Store
from pdstore.telemetry.journal import Journal
from pdstore.telemetry.request_record import RequestRecord, RequestTimer
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool
from pdstore.worker.save import OpenSave
from pdstore.worker.swap import BlockCopy, Swap, open_swap

__all__ = [
    "NO_BLOCK",
    "AsyncRunner",
    "BlockCopy",
    "BreakEven",
    "ConfigError",
    "Decision",
    "DeviceError",
    "Direction",
    "Handoff",
    "HandoffId",
    "Job",
    "JobError",
    "JobResult",
    "Journal",
    "KVPool",
    "LayerSpec",
    "Layout",
    "LayoutError",
    "Lookup",
    "Match",
    "Metrics",
    "MultimodalItem",
    "Namespace",
    "OpenSave",
    "Outcome",
    "PDStoreError",
    "Pipeline",
    "PrefixCacheManager",
    "PromptKeys",
    "Reason",
    "RequestRecord",
    "RequestTimer",
    "SaveFailed",
    "Settings",
    "Store",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "Swap",
    "SwapError",
    "open_store",
    "open_swap",
    "read_settings",
    "weights_revision",
]
