"""A directory on a real disk: the suite's temporary directory may lie in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from pdstore.store.file.mount import mount_of

_TREE = Path(__file__).parents[2]
_IN_MEMORY = {"tmpfs", "ramfs"}


def is_disk(folder: Path) -> bool:
    """Returns whether files in a folder can be read past the page cache, from a disk."""
    if mount_of(folder).kind in _IN_MEMORY:
        return False
    path = folder / f".direct-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return True


@pytest.fixture
def disk(tmp_path):
    """A new directory on a disk: in the suite's temporary directory, else near the tests."""
    for folder in (tmp_path, _TREE, Path("/var/tmp"), Path.home()):
        if is_disk(folder):
            made = Path(tempfile.mkdtemp(prefix=".pdstore-disk-", dir=folder))
            yield made
            shutil.rmtree(made, ignore_errors=True)
            return
    pytest.fail("no directory on a disk with O_DIRECT: set TMPDIR to one")
