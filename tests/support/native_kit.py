"""The native library for tests: a build whose device calls can be made to fail."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import pdstore
from pdstore.errors import NativeError
from pdstore.native.build import build_library
from pdstore.native.library import Library

SOURCES = Path(pdstore.__file__).parents[1] / "csrc"
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_gpu])]


@cache
def _build() -> Library | NativeError:
    try:
        options = ["-DPDSTORE_TESTING=ON"]
        options += ["-DCMAKE_CUDA_ARCHITECTURES=native"] if HAS_GPU else ["-DPDSTORE_CUDA=OFF"]
        return Library(build_library(SOURCES, options))
    except NativeError as error:
        return error


def library() -> Library:
    """The test build. Where it cannot be built the tests fail, and say why: it is never skipped."""
    built = _build()
    if isinstance(built, NativeError):
        pytest.fail(f"no native library: {built}")
    return built
