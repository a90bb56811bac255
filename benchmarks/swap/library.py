"""libpdstore with other ways to copy in it: csrc/bench/baselines.cu."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_uint64, c_void_p

import torch

from pdstore.errors import ConfigError, SwapError
from pdstore.native.build import SOURCES, build_library
from pdstore.native.library import Library


class BenchLibrary(Library):
    """A benchmark build (`-DPDSTORE_BENCH=ON`)."""

    def baseline(
        self, method: int, to: int, source: int, n: int, num_bytes: int, per_block: int, stream: int
    ) -> None:
        """Moves n pieces of `num_bytes` in another way.

        method: the number of `pds_bench_copy`.
        to, source: addresses of tables of n addresses; `per_block` neighbours are one KV block's.
        Raises SwapError with the device's code.
        """
        call = self.calls.pds_bench_copy
        call.argtypes = [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_uint64]
        code = call(method, to, source, n, num_bytes, per_block, stream)
        if code:
            raise SwapError(f"baseline {method} failed with {code}", device_code=code)


def open_bench_library() -> BenchLibrary:
    """Builds the library for this GPU. Raises ConfigError without one, NativeError without nvcc."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU")
    major, minor = torch.cuda.get_device_capability()
    options = ["-DPDSTORE_BENCH=ON", f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}-real"]
    return BenchLibrary(build_library(SOURCES, options))
