"""Checks of this host: memory for staging, limits, the native library, GPUs."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from pdstore.cli.checks.finding import Finding, bad, info, ok, warn
from pdstore.cli.quantity import size
from pdstore.errors import NativeError
from pdstore.native.library import Library, load_library
from pdstore.settings import Settings

_FEW_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def available_memory() -> int | None:
    """Returns the bytes of memory that a new process may take; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
    limit = _container_limit()
    found = [value for value in (kib and kib * 1024, limit) if value]
    return min(found, default=None)


def _container_limit() -> int | None:
    try:
        text = _CGROUP.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def check_memory(settings: Settings, available: int | None) -> Iterator[Finding]:
    """Yields whether staging fits this host."""
    staging = settings.staging
    if available is None:
        yield info("staging", f"{size(staging)}; this system does not tell its free memory")
    elif staging > available:
        yield bad(
            "staging",
            f"PDSTORE_STAGING={size(staging)}, and {size(available)} of memory are free",
            "set it to 1GiB, or to a tenth of the memory at most",
        )
    elif staging > available // 2:
        yield warn(
            "staging",
            f"PDSTORE_STAGING={size(staging)} is over half of the {size(available)} that are free",
            "set it to 1GiB: more than a few requests' blocks are never on their way at once",
        )
    else:
        yield ok("staging", f"{size(staging)} of {size(available)} free")


def check_limits(settings: Settings, num_gpus: int) -> Iterator[Finding]:
    """Yields the limits of a process that are too small."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_rdma = "rdma" in settings.store
    if is_rdma and locked not in (-1, resource.RLIM_INFINITY) and locked < settings.staging:
        yield bad(
            "locked memory",
            f"ulimit -l is {size(locked)}, less than staging, which RDMA locks",
            "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:
        yield warn("open files", f"ulimit -n is {files}", "ulimit -n 65536")
    is_copied = settings.store.startswith("shm://") or settings.seal_key_file is not None
    if num_gpus and not is_copied:
        yield info(
            "arena",
            "if P and D both run on this host, PDSTORE_STORE=shm://pool?size=64GiB is faster:"
            " their GPUs copy to and from the pool's memory",
        )


def check_native(settings: Settings, count_gpus: Callable[[], int]) -> Iterator[Finding]:
    """Yields the way in which blocks are copied on this host."""
    num_gpus = count_gpus()
    what = f"{num_gpus} GPUs" if num_gpus else "no GPU"
    try:
        library: Library | None = load_library(settings, for_gpu=num_gpus > 0)
        why = "PDSTORE_NATIVE=off" if settings.native == "off" else "none found"
    except NativeError as error:
        library, why = None, str(error)
    if library is not None:
        yield ok("native library", f"{library.path.name}, {what}")
    else:
        yield warn(
            "native library",
            f"{why}: blocks are copied by torch, slower ({what})",
            "`pdstore native` builds it: with cmake, a C++ compiler, and a ~/.cache to write to",
        )
