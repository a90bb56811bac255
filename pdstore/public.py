"""The public names of the package `pdstore`."""

from pdstore.async_runner import AsyncRunner
from pdstore.engine.job_end import JobEnd
from pdstore.engine.phase import RequestPhase
from pdstore.engine.record import Records
from pdstore.engine.request import EngineRequest
from pdstore.engine.self_test import self_test
from pdstore.errors import (
    ConfigError,
    DeviceError,
    Direction,
    IllegalCall,
    JobError,
    JobResult,
    LayoutError,
    PDStoreError,
    Reason,
    SaveFailed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    SwapError,
)
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.handoff import Handoff, HandoffId, TransferParams
from pdstore.format.identity import Identity, LayerSpec
from pdstore.format.keys import MultimodalItem, Namespace, PromptKeys
from pdstore.format.layout import Layout, Pipeline
from pdstore.format.plan import LoadPlan, SavePlan
from pdstore.format.weights import weights_revision
from pdstore.metrics import Metrics
from pdstore.scheduler.break_even import PromptTimes
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_engine_settings, read_settings
from pdstore.status.server import Reporting
from pdstore.store import open_store
from pdstore.store.base import Store
from pdstore.store.connect import check_store
from pdstore.worker.job import Job
from pdstore.worker.open_save import OpenSave
from pdstore.worker.pool import KVPool
from pdstore.worker.swap import BlockCopy, Swap, open_swap

__all__ = [
    "NO_BLOCK",
    "AsyncRunner",
    "BlockCopy",
    "ConfigError",
    "DeviceError",
    "Direction",
    "EngineRequest",
    "Handoff",
    "HandoffId",
    "Identity",
    "IllegalCall",
    "Job",
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
    "MultimodalItem",
    "Namespace",
    "OpenSave",
    "PDStoreError",
    "Pipeline",
    "PrefixCacheManager",
    "PromptKeys",
    "PromptTimes",
    "Reason",
    "Records",
    "Reporting",
    "RequestPhase",
    "SaveFailed",
    "SavePlan",
    "Settings",
    "Store",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "Swap",
    "SwapError",
    "TransferParams",
    "check_store",
    "open_store",
    "open_swap",
    "read_engine_settings",
    "read_settings",
    "self_test",
    "weights_revision",
]
