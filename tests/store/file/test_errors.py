"""Errors of the system are the store's errors: which, with what words and count."""

from __future__ import annotations

import errno

import pytest

from pdstore.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.native.abi import OTHER_LENGTH
from pdstore.store.file.errors import error_of, named_error


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


def test_an_error_of_the_system_is_named_and_kept_as_the_cause():
    full = pytest.raises(StoreFull, match="No space left on device: key")
    with full as caught, named_error("file:///pool", "key", 2):
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.num_done == 2
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_of_the_store_passes_as_it_is():
    with pytest.raises(StoreError, match=r"^mine$"), named_error("file:///pool", "key"):
        raise StoreUnavailable("mine")
