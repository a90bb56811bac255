"""Checks of a pool's memory: whether its file system gives huge pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdstore.cli.checks.finding import Finding, info, ok, warn

MOUNTS = Path("/proc/self/mountinfo")
_HUGE = ("always", "within_size")
_MOUNT = "mount -t tmpfs -o huge=always,size=70G tmpfs /mnt/pool, then shm://...&dir=/mnt/pool"
_MOUNT_OF_FILES = (  # with huge=always a marker of 64 bytes takes 2 MiB
    "mount -t tmpfs -o huge=within_size,size=40G,mode=0700 tmpfs /mnt/pool, then"
    " file:///mnt/pool/files"
)


class _Mount(NamedTuple):
    point: Path
    kind: str
    options: frozenset[str]

    @property
    def is_huge(self) -> bool:
        return any(f"huge={kind}" in self.options for kind in _HUGE)


def check_pages(path: Path, mounts: str, num_gpus: int) -> Iterator[Finding]:
    """Yields whether the arena at `path` lies in huge pages, which a GPU registers faster.

    mounts: as in /proc/self/mountinfo; see proc_pid_mountinfo(5).
    """
    mount = _mount_of(path, mounts)
    if mount is None or mount.kind != "tmpfs":
        yield info("huge pages", f"{path.parent} is no tmpfs: whether it has any cannot be told")
    elif mount.is_huge:
        yield ok("huge pages", f"the tmpfs at {mount.point} gives them")
    elif num_gpus:
        said = f"the tmpfs at {mount.point} gives none: a GPU registers the arena more slowly"
        yield warn("huge pages", said, _MOUNT)
    else:
        yield info("huge pages", f"the tmpfs at {mount.point} gives none, which GPUs would use")


def check_file_pages(root: Path, mounts: str, num_gpus: int) -> Iterator[Finding]:
    """Yields whether files in memory lie in huge pages, where writes are several times as fast.

    Nothing for a directory on a disk.
    mounts: as for `check_pages`.
    """
    mount = _mount_of(root, mounts)
    if mount is None or mount.kind != "tmpfs":
        return
    said = f"the tmpfs at {mount.point} gives none: files are written several times more slowly"
    if mount.is_huge:
        yield ok("huge pages", f"the tmpfs at {mount.point} gives them")
    elif num_gpus:
        yield warn("huge pages", said, _MOUNT_OF_FILES)
    else:
        yield info("huge pages", said)


def _mount_of(path: Path, mounts: str) -> _Mount | None:
    """Returns the mount that a path is in: the one at the nearest directory, the last there."""
    found = None
    for line in mounts.splitlines():
        here, _, there = line.partition(" - ")
        point, (kind, _, options) = Path(here.split()[4]), there.split(maxsplit=2)
        is_nearer = found is None or len(point.parts) >= len(found.point.parts)
        if path.is_relative_to(point) and is_nearer:
            found = _Mount(point, kind, frozenset(options.split(",")))
    return found
