"""Finds the library libpdstore in the installed package, or builds it from `csrc` at first use."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pdstore.environment import cache_directory
from pdstore.errors import NativeError

log = logging.getLogger(__name__)

_FILE = "libpdstore.so"
_PACKAGE = Path(__file__).parents[1]
SOURCES = _PACKAGE.parent / "csrc"
"""The C++ sources of a checkout; an installed package has none."""
_FOR_GPUS: Sequence[str] = ()
_FOR_HOSTS: Sequence[str] = ("-DPDSTORE_CUDA=OFF",)


def find_library(*, with_cuda: bool) -> Path:
    """Returns the library's path in the installed package; if it is not there, builds the library.

    with_cuda: True to build the library for GPUs as well, if nvcc is installed.
    Raises NativeError if there is no library and none can be built.
    """
    packaged = _PACKAGE / _FILE
    options = _FOR_GPUS if with_cuda else _FOR_HOSTS
    return packaged if packaged.exists() else build_library(SOURCES, options)


def find_built(
    package: Path = _PACKAGE, sources: Path = SOURCES, directory: Path | None = None
) -> Path | None:
    """Returns the path of a library that is built already; None if there is none. Builds nothing.

    directory: the directory of the builds that are kept; None: this user's cache directory.
    """
    found = [package / _FILE]
    if (sources / "CMakeLists.txt").exists():
        found += [_place_of(sources, each, directory) / _FILE for each in (_FOR_HOSTS, _FOR_GPUS)]
    return next((path for path in found if path.exists()), None)


def build_library(
    sources: Path, options: Sequence[str] = (), directory: Path | None = None
) -> Path:
    """Builds `sources` with CMake, unless a build of the same sources and options is kept.

    options: options of CMake such as `-DPDSTORE_TESTING=ON`.
    directory: the directory of the builds that are kept; None: this user's cache directory.
    If several processes call it at the same time, one builds and the others wait. Raises
    NativeError if the build fails (with its output), without sources or a writable `directory`.
    """
    if not (sources / "CMakeLists.txt").exists():
        raise NativeError(
            "this installation was built without a compiler and has no native library"
        )
    place = _place_of(sources, options, directory)
    built = place / _FILE
    try:
        if built.exists():
            return built
        place.mkdir(parents=True, exist_ok=True)
        with (place / "lock").open("w") as lock:  # the kernel unlocks it if this process dies
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(sources, options, built)
    except OSError as error:
        raise NativeError(f"the native library cannot be kept in {place}: {error}") from error
    return built


def _place_of(sources: Path, options: Sequence[str], directory: Path | None) -> Path:
    digest = hashlib.sha256(repr(sorted(options)).encode())
    digest.update(str(shutil.which("nvcc")).encode())  # a build with nvcc differs
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return (directory or cache_directory("native")) / digest.hexdigest()[:20]


def _build(sources: Path, options: Sequence[str], target: Path) -> None:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        raise NativeError("the native library is not built, and cmake is not installed")
    log.warning("building %s, once; this takes about a minute", target)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        configure = [cmake, "-S", str(sources), "-B", scratch, *options]
        build = [cmake, "--build", scratch, "--parallel", str(min(4, os.cpu_count() or 1))]
        for command in (configure, build):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                words = (done.stdout + done.stderr).strip()[-2000:]
                raise NativeError(f"`{' '.join(command)}` failed:\n{words}")
        product = Path(scratch) / _FILE
        if not product.exists():
            raise NativeError("the native library cannot be built: no C++ compiler")
        os.replace(product, target)
