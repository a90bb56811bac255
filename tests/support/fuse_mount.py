"""A file system with the faults of real ones: a FUSE mount that passes calls on to a directory.

    with mounted(tmp_path / "disk", link="EPERM") as disk:
        FileStore(disk.at / "pool")
        disk.hurt("read", "part-of-a-name", "EIO")

Its process is tests/support/fuse_server.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import child
from tests.support.kv import eventually

_SERVER = Path(__file__).with_name("fuse_server.py")
_READY_S = 30.0


class FuseMount:
    """A mounted file system: `at` is where it is seen, `behind` the directory that it passes on to.

    What is done in `behind` is done by another host: this host's kernel does not notice it.
    """

    def __init__(self, at: Path, behind: Path, faults: Path) -> None:
        self.at = at
        self.behind = behind
        self._faults = faults

    def hurt(self, call: str, name: str, why: str) -> None:
        """Lets a call fail from now on for paths with these words; an empty `name` means each."""
        faults = json.loads(self._faults.read_text())
        self._write([*faults, [call, name, why]])

    def heal(self) -> None:
        """Ends all faults."""
        self._write([])

    def _write(self, faults: list[list[str]]) -> None:
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.rename(self._faults)


@contextlib.contextmanager
def mounted(
    place: Path, behind: Path | None = None, options: dict[str, Any] | None = None, **faults: str
) -> Iterator[FuseMount]:
    """Mounts a file system in the directory `place`, which is made; skips where nobody can.

    behind: a directory of another mount, to be another host's view of it.
    options: of FUSE, as `negative_timeout`.
    faults: calls that always fail, each with an errno's name: `link="EPERM"`; `colon="EINVAL"`
      stands for names with one, `statfs="zero"` for a file system that tells no room, and
      `coarse="1s"` for one that counts times in seconds.
    """
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("only root can mount a FUSE file system, where /dev/fuse is")
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: without libfuse
        pytest.skip(f"needs mfusepy (pip) and libfuse (apt: fuse3): {error}")
    behind = behind or place / "behind"
    at, told = place / "at", place / "faults.json"
    for folder in (behind, at):
        folder.mkdir(parents=True, exist_ok=True)
    mount = FuseMount(at, behind, told)
    mount._write([[call, "", why] for call, why in faults.items()])
    words = [sys.executable, _SERVER, behind, at, told, json.dumps(options or {})]
    with child(words) as process:
        try:
            eventually(lambda: os.path.ismount(at) or process.poll() is not None, _READY_S)
            assert process.poll() is None, "the FUSE process has ended"
            yield mount
        finally:
            subprocess.run(["umount", "-l", at], check=False, timeout=10)
