"""Leases: one call of the library does what a call for each file does."""

from __future__ import annotations

import errno
import os
import time

import pytest

from pdstore.native.library import load_library
from pdstore.store.file.files import renew_leases
from tests.support.kv import settings_of


@pytest.fixture(params=["off", "require"])
def leases(request):
    library = load_library(settings_of(native=request.param), for_gpu=False)
    return lambda paths: renew_leases(paths, 1000.0, library)


@pytest.fixture
def paths(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    return [str(tmp_path / name) for name in "abc"]


def test_a_lease_ends_that_much_later_and_its_use_is_now(leases, paths):
    assert leases(paths) == (3, 0)
    for path in paths:
        status = os.stat(path)
        assert status.st_mtime == pytest.approx(time.time() + 1000, abs=60)
        assert status.st_atime == pytest.approx(time.time(), abs=60)


def test_the_first_missing_file_ends_it(leases, paths):
    os.unlink(paths[1])
    assert leases(paths) == (1, errno.ENOENT)
    assert os.stat(paths[2]).st_mtime == 1


def test_a_link_is_leased_and_what_it_leads_to_is_not(leases, paths, tmp_path):
    os.unlink(paths[0])
    os.symlink(paths[1], paths[0])
    os.utime(paths[1], (1, 1))
    assert leases([paths[0], paths[2]]) == (2, 0)
    assert os.stat(paths[1]).st_mtime == 1


def test_nothing_is_leased_at_once(leases):
    assert leases([]) == (0, 0)


def test_any_other_trouble_is_told(leases, paths):
    assert leases([paths[0], f"{paths[1]}/in-a-file"]) == (1, errno.ENOTDIR)
