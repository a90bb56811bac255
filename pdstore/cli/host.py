"""Checks of `pdstore doctor` that do not use the store: of settings, memory and other parts."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pdstore.async_runner import AsyncRunner
from pdstore.cli.answer import Finding, bad, info, ok, size, warn
from pdstore.environment import plugins_of_vllm
from pdstore.errors import NativeError
from pdstore.native.library import load_library
from pdstore.settings import Settings, setting_warnings
from pdstore.status.server import settings_of
from pdstore.store.connect import place_of
from pdstore.store.file.mount import mount_of
from pdstore.store.url import Reach, urls_in, without_secret
from pdstore.telemetry.spans import REMEDY, why_not_received

_FEW_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup/memory.max")
MOUNTS = Path("/proc/self/mountinfo")
_HUGE = frozenset({"huge=always", "huge=within_size"})
_MOUNT = "mount -t tmpfs -o huge=always,size=70G tmpfs /mnt/pool, then shm://...&dir=/mnt/pool"
_MOUNT_OF_FILES = (  # with huge=always a marker of 64 bytes takes 2 MiB
    "mount -t tmpfs -o huge=within_size,size=40G,mode=0700 tmpfs /mnt/pool, then"
    " file:///mnt/pool/files"
)


def check_settings(
    settings: Settings, engine_block: int, longest: int | None = None
) -> Iterator[Finding]:
    """Yields findings: settings that differ from their defaults, and settings that cannot work.

    longest: tokens of the longest prompt, if known.
    """
    for one in settings_of(settings):
        if one["origin"] != "default":
            yield info(str(one["name"]), f"{one['value']} ({one['origin']})")
    if not settings.pd_transfer_via_storage:
        yield warn(
            "switch",
            "PD_TRANSFER_VIA_STORAGE is 0: an engine with these settings does not use pdstore",
            "export PD_TRANSFER_VIA_STORAGE=1 for P and for D",
        )
    yield from _check_plugins(settings)
    if settings.block_tokens % engine_block:
        yield bad(
            "block size",
            f"PDSTORE_BLOCK_TOKENS={settings.block_tokens} is no multiple of the engine's"
            f" {engine_block}",
            f"set it to {max(engine_block, settings.block_tokens // engine_block * engine_block)},"
            " the same for P and D, or name the engine's block by --engine-block",
        )
    yield from (warn("settings", *each) for each in setting_warnings(settings, longest))
    yield from _check_place(settings)


def _check_plugins(settings: Settings) -> Iterator[Finding]:
    plugins = plugins_of_vllm()
    if settings.pd_transfer_via_storage and plugins is not None and "pdstore" not in plugins:
        others = [each for one in plugins if (each := one.strip()) not in ("", "pdstore")]
        yield warn(
            "plugins",
            f"VLLM_PLUGINS={','.join(plugins)} leaves pdstore out: vLLM then ignores the switch,"
            " without a word",
            f"write VLLM_PLUGINS={','.join([*others, 'pdstore'])}, without blanks",
        )


def _check_place(settings: Settings) -> Iterator[Finding]:
    place = place_of(settings.store, settings)
    schemes = [url.partition("://")[0] for url in urls_in(settings.store)]
    if place.reach is Reach.PROCESS:
        yield bad(
            "place",
            f"{schemes[0]}:// is in one process: P and D in two processes never meet there",
            "set PDSTORE_STORE to file://, shm:// or a server, the same for P and D",
        )
    for scheme, each in zip(schemes, place.tiers, strict=True):
        if each.encrypted_scheme is not None:
            yield warn(
                "encryption",
                f"{scheme}:// sends KV and the password to another host without encryption",
                f"write {each.encrypted_scheme} (and ?ca=FILE for an authority of your own), or use"
                " a private network",
            )


def available_memory() -> int | None:
    """Returns the bytes of memory that a new process may take; None if the system does not tell."""
    found = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError):  # the container's limit
        limit = _CGROUP.read_text().strip()
        found += [int(limit)] if limit.isdigit() else []
    return min(found, default=None)


def check_memory(settings: Settings, available: int | None) -> Iterator[Finding]:
    """Yields a finding: whether staging fits into this host's free memory."""
    staging = settings.staging
    free = "unknown" if available is None else size(available)
    if available is not None and staging > available // 2:
        finding = bad if staging > available else warn
        yield finding(
            "staging",
            f"PDSTORE_STAGING={size(staging)}, and {free} of memory are free",
            "set it to 1GiB, which holds all blocks that are moved at a time",
        )
    else:
        yield ok("staging", f"{size(staging)}, and {free} of memory are free")


def check_limits(settings: Settings, num_gpus: int) -> Iterator[Finding]:
    """Yields findings: limits of this process that are too small."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    place = place_of(settings.store, settings)
    if (
        place.locks_memory
        and locked not in (-1, resource.RLIM_INFINITY)
        and locked < settings.staging
    ):
        yield bad(
            "locked memory",
            f"ulimit -l is {size(locked)}, less than staging, which RDMA locks",
            "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:
        yield warn("open files", f"ulimit -n is {files}", "ulimit -n 65536")
    if num_gpus and not place.is_memory and settings.seal_key_file is None:
        yield info(
            "arena",
            "if P and D both run on this host, PDSTORE_STORE=shm://pool?size=64GiB is faster:"
            " their GPUs copy to and from the pool's memory",
        )


def check_native(settings: Settings, num_gpus: int) -> Iterator[Finding]:
    """Yields a finding: whether blocks are copied by the native library or by torch."""
    what = f"{num_gpus} GPUs" if num_gpus else "no GPU"
    remedy = "to let doctor build it, install cmake and a C++ compiler, and make ~/.cache writable"
    try:
        library = load_library(settings, for_gpu=num_gpus > 0)
        why = "none found"
        if settings.native == "off":
            why = "PDSTORE_NATIVE=off"
            remedy = "unset PDSTORE_NATIVE"
    except NativeError as error:
        library = None
        why = str(error)
    if library is not None:
        yield ok("native library", f"{library.path.name}, {what}")
    else:
        yield warn(
            "native library",
            f"{why}: torch copies blocks, which is slower ({what})",
            remedy,
        )


def check_traces(settings: Settings, timeout_s: float = 2.0) -> Iterator[Finding]:
    """Yields a finding if PDSTORE_TRACES is set: whether an OTLP receiver answers there."""
    if settings.traces is None:
        return
    asker: AsyncRunner[str | None] = AsyncRunner("pdstore-traces")
    asker.launch(partial(why_not_received, settings.traces, timeout_s))
    asker.close(0.0)  # the thread ends after this request
    try:
        why = asker.sync(timeout_s)
    except TimeoutError:
        why = f"no answer came within {timeout_s:g} s"
    shown = f"PDSTORE_TRACES={without_secret(settings.traces)}"
    if why is None:
        yield ok("traces", f"{shown}: a receiver answers")
    else:
        yield warn("traces", f"{shown}: spans will be lost: {why}", REMEDY)


def check_pages(path: Path, mounts: str, num_gpus: int, *, is_arena: bool) -> Iterator[Finding]:
    """Yields a finding: whether the arena or the files at `path` lie in huge pages.

    A GPU registers an arena in huge pages faster, and files in huge pages are written several times
    as fast. Nothing is yielded for files on a disk.

    mounts: as in /proc/self/mountinfo; see proc_pid_mountinfo(5).
    """
    cost = "files are written several times more slowly"
    remedy = _MOUNT_OF_FILES
    if is_arena:
        cost = "a GPU registers the arena more slowly"
        remedy = _MOUNT
    found = mount_of(path, mounts)
    if found.kind != "tmpfs":
        if is_arena:
            message = f"{path.parent} is no tmpfs: it is not known if it has huge pages"
            yield info("huge pages", message)
        return
    if found.options & _HUGE:
        yield ok("huge pages", f"the tmpfs at {found.point} gives huge pages")
        return
    message = f"the tmpfs at {found.point} gives no huge pages: {cost}"
    yield warn("huge pages", message, remedy) if num_gpus else info("huge pages", message)
