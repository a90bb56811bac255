"""Errors of the system are the store's errors: which, with what words and count."""

from __future__ import annotations

import errno
import resource
import subprocess
from collections import deque

import pytest

from pdstore.errors import (
    StoreDenied,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.store.file.files import OTHER_LENGTH, error_of, named_error


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.ETIMEDOUT, StoreTimeout),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.EISDIR, WrongLength),
        (errno.ELOOP, WrongLength),
        (OTHER_LENGTH, WrongLength),
    ],
)
def test_an_errno_is_the_error_that_says_what_to_do(why, kind):
    error = error_of("file:///pool", why, "key", 3)
    assert type(error) is kind
    assert error.num_done == 3
    assert str(error).startswith("file:///pool: ")
    assert str(error).endswith(": key")


def test_a_file_system_without_inodes_says_so_and_not_that_it_is_full(full_disk):
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", full_disk], check=True)
    with pytest.raises(StoreFull) as caught, named_error(f"file://{full_disk}", "key"):
        deque((full_disk / str(n)).touch() for n in range(9))
    assert str(caught.value).startswith(f"file://{full_disk}: no inodes are left: key")
    assert caught.value.remedy == "delete files, or make the file system with more"


def test_a_limit_of_a_files_size_is_named_and_is_no_store_that_is_down(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = pytest.raises(StoreFull, match="a file may have 4096 bytes: raise ulimit -f")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with full, named_error(f"file://{tmp_path}", "key"):
            (tmp_path / "key").write_bytes(bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
