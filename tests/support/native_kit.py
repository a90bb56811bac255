"""The native library for tests: a build whose device calls can be made to fail."""

from __future__ import annotations

from array import array
from ctypes import Structure, byref, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import pytest
import torch

import pdstore
from pdstore.errors import NativeError
from pdstore.native.build import build_library
from pdstore.native.library import Library, address_of
from pdstore.store.base import Slots

SOURCES = Path(pdstore.__file__).parents[1] / "csrc"
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_gpu])]
CALLS = (
    *("allocate", "stream", "event", "record", "wait", "synchronize", "drain"),
    *("batch", "strided", "stage", "enter", "capturing", "push"),
    *("register", "unregister", "query", "sum"),
)
"""The device calls that can be made to fail, in the header's order."""


class Live(Structure):
    """pds_live of csrc/tests/faults.h."""

    _fields_ = (("allocations", c_int64), ("streams", c_int64), ("events", c_int64))


class FaultyLibrary(Library):
    """A test build (`-DPDSTORE_TESTING=ON`)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.calls.pds_test_fail.argtypes = [c_int32, c_int64, c_int32, c_int32]
        self.calls.pds_test_delay.argtypes = [c_int64]
        self.calls.pds_test_change.argtypes = [c_uint64, c_int64]
        self.calls.pds_test_live.argtypes = [c_void_p]

    def fail(self, call: str, nth: int, code: int, *, sticky: bool = False) -> None:
        """Makes the nth call of this kind from now on fail; if `sticky`, all calls after it too."""
        self.calls.pds_test_fail(CALLS.index(call), nth, code, sticky)

    def delay(self, microseconds: int) -> None:
        """Makes every copy call take this much longer."""
        self.calls.pds_test_delay(microseconds)

    def change(self, memory: memoryview) -> None:
        """Changes a byte that the next copy to this memory wrote, just after that copy."""
        self.calls.pds_test_change(address_of(memory), len(memory))

    def mend(self) -> None:
        """Takes back all failures, delays and changes."""
        self.calls.pds_test_fail(-1, 0, 0, 0)
        self.calls.pds_test_change(0, 0)
        self.calls.pds_test_delay(0)

    def live(self) -> tuple[int, int, int]:
        """Returns how many device allocations, streams and events exist now."""
        live = Live()
        self.calls.pds_test_live(byref(live))
        return live.allocations, live.streams, live.events


@cache
def _build() -> FaultyLibrary | NativeError:
    try:
        options = ["-DPDSTORE_TESTING=ON"]
        options += ["-DCMAKE_CUDA_ARCHITECTURES=native"] if HAS_GPU else ["-DPDSTORE_CUDA=OFF"]
        return FaultyLibrary(build_library(SOURCES, options))
    except NativeError as error:
        return error


def open_library() -> FaultyLibrary:
    """Returns the test build. Fails the test with the reason where it cannot be built."""
    built = _build()
    if isinstance(built, NativeError):
        pytest.fail(f"no native library: {built}")
    return built


@pytest.fixture(scope="session")
def library():
    """The test build."""
    return open_library()


@pytest.fixture(autouse=True)
def mended():
    """Takes back what a test told the test build to do wrong."""
    yield
    if _build.cache_info().currsize:
        open_library().mend()


def addresses_and_sizes(slots: Slots) -> tuple[bytes, bytes]:
    """Where slots lie and how long their values are, as the library takes them."""
    values = [slots.value(i) for i in range(len(slots))]
    sizes = array("q", [len(value) for value in values])
    return array("Q", [address_of(value) for value in values]).tobytes(), sizes.tobytes()
