"""Every name that `import pdstore` offers."""

from pdstore.async_runner import AsyncRunner
from pdstore.engine.record import Records
from pdstore.engine.request import EngineRequest, JobEnd, LoadPlan, PromptTimes, SavePlan
from pdstore.engine.self_test import self_test
from pdstore.errors import (
    BadValue,
    ConfigError,
    DeviceError,
    Forged,
    JobCancelled,
    JobDeadline,
    JobError,
    LayoutError,
    MissingExtra,
    NativeError,
    OtherSeal,
    PDStoreError,
    PoolClosed,
    QueueFull,
    ReadOnly,
    SaveFailed,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    SwapError,
    WrongLength,
)
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.layout import NO_BLOCK, BlockTables, LayerSpec, Layout, Pipeline
from pdstore.format.multimodal import MultimodalItem
from pdstore.format.namespace import Namespace, Part
from pdstore.format.weights import weights_revision
from pdstore.metrics import Metrics
from pdstore.outcome import Direction, JobResult, Reason
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_engine_settings, read_settings
from pdstore.status.reporting import Reporting
from pdstore.store import open_store
from pdstore.store.base import Slots, Store
from pdstore.store.connect import check_store
from pdstore.worker.job import Job
from pdstore.worker.open_save import OpenSave
from pdstore.worker.pool import KVPool
from pdstore.worker.swap import (
    BlockCopy,
    BlockCopyPlan,
    ReadyEvent,
    Registrar,
    Swap,
    open_swap,
)

__all__ = [
    "NO_BLOCK",
    "AsyncRunner",
    "BadValue",
    "BlockCopy",
    "BlockCopyPlan",
    "BlockKey",
    "BlockTables",
    "ConfigError",
    "DeviceError",
    "Direction",
    "EngineRequest",
    "Forged",
    "Handoff",
    "HandoffId",
    "Job",
    "JobCancelled",
    "JobDeadline",
    "JobEnd",
    "JobError",
    "JobResult",
    "KVPool",
    "LayerSpec",
    "Layout",
    "LayoutError",
    "LoadPlan",
    "Lookup",
    "Match",
    "Metrics",
    "MissingExtra",
    "MultimodalItem",
    "Namespace",
    "NativeError",
    "OpenSave",
    "OtherSeal",
    "PDStoreError",
    "Part",
    "Pipeline",
    "PoolClosed",
    "PrefixCacheManager",
    "PromptKeys",
    "PromptTimes",
    "QueueFull",
    "ReadOnly",
    "ReadyEvent",
    "Reason",
    "Records",
    "Registrar",
    "Reporting",
    "SaveFailed",
    "SavePlan",
    "Settings",
    "Slots",
    "Store",
    "StoreClosed",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "Swap",
    "SwapError",
    "WrongLength",
    "check_store",
    "open_store",
    "open_swap",
    "read_engine_settings",
    "read_settings",
    "self_test",
    "weights_revision",
]
