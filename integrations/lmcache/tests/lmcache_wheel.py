"""Makes LMCache's own classes importable from its wheel, or skips the module that imports this.

`make setup` downloads the wheel without its dependencies. Its Python is imported from the archive
and one of its libraries from a copy, because the system loads none out of an archive. Empty modules
stand for its telemetry and for what compiles kernels; the L2 interface, the loader of plug-ins,
keys, memory objects and bitmaps are the wheel's.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
import warnings
import zipfile
from pathlib import Path

import pytest

WHEELS = Path(os.environ.get("TEST_LMCACHE_WHEELS") or Path(sys.prefix) / "wheels")
_NATIVE = "lmcache/lmcache_native."


class _Nothing(types.ModuleType):
    """A module in which every name is a class that takes anything and decorates nothing."""

    __path__ = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Anything:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, function: object) -> object:
        return function

    def __getattr__(self, name: str) -> object:
        return _Anything()

    def __bool__(self) -> bool:
        return False


def _find() -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted(WHEELS.glob(f"lmcache-*-{tag}-*.whl"))
    if not wheels:
        why = f"LMCache's wheel for this Python is not in {WHEELS}: make setup downloads it"
        pytest.skip(why, allow_module_level=True)
    return wheels[-1]


def _leave_out(*names: str) -> list[str]:
    """Puts empty modules in the place of those that are not installed; returns their names."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.modules.update({name: _Nothing(name) for name in missing})
    return missing


def _load_native(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as opened:
        (library,) = (name for name in opened.namelist() if name.startswith(_NATIVE + "cpython"))
        path = opened.extract(library, directory)
        loader = importlib.machinery.ExtensionFileLoader("lmcache.lmcache_native", path)
        spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
        sys.modules[loader.name] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules[loader.name])


WHEEL = _find()
sys.path.append(str(WHEEL))
_load_native(WHEEL)
_TRACE = "lmcache.v1.mp_observability.trace"
for _name in ("lmcache.usage_telemetry", _TRACE, f"{_TRACE}.decorator"):
    sys.modules[_name] = _Nothing(_name)
_ABSENT = _leave_out("numba", "nvtx", "cachetools", "psutil", "sortedcontainers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.v1.distributed import api, config, storage_manager
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter, plugin_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
for _name in _ABSENT:  # others may ask whether they are installed
    del sys.modules[_name]

__all__ = [
    "MemoryFormat",
    "MemoryObjMetadata",
    "TensorMemoryObj",
    "api",
    "config",
    "create_l2_adapter",
    "parse_args_to_l2_adapters_config",
    "plugin_l2_adapter",
    "storage_manager",
]
