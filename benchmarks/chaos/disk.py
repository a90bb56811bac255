"""Disk: a small file system of its own for a pool, which the campaign fills."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 16


class Disk:
    """A directory on a tmpfs of its own, or a plain directory where this user may not mount.

    is_small: True if it is the tmpfs, which can be filled.
    """

    def __init__(self, path: Path, *, is_small: bool) -> None:
        self.path, self.is_small = path, is_small
        self._filler = path / "filler"

    def fill(self, leave_bytes: int) -> None:
        """Fills it, except for `leave_bytes`."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize - leave_bytes
        with contextlib.suppress(OSError), self._filler.open("wb") as file:
            for _ in range(max(0, free) // _BLOCK):
                file.write(bytes(_BLOCK))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def open_disk(path: Path, size_mib: int = 32) -> Iterator[Disk]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "tmpfs", str(path)]
    is_mounted = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield Disk(path, is_small=is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(path)], check=False)
