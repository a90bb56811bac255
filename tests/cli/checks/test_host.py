"""Checks of this host: staging against memory, limits, the native library."""

from __future__ import annotations

import resource

import pytest

from pdstore.cli.checks.finding import Level
from pdstore.cli.checks.host import available_memory, check_limits, check_memory, check_native
from pdstore.settings import read_settings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("staging", "level"),
    [("40GiB", Level.BAD), ("13GiB", Level.WARN), ("1GiB", Level.OK)],
)
def test_staging_is_compared_with_the_free_memory(staging, level):
    [finding] = check_memory(read_settings(staging=staging), 24 * GIB)
    assert finding.level is level
    assert bool(finding.remedy) is (level is not Level.OK)


def test_this_machine_tells_its_free_memory():
    available = available_memory()
    assert available is not None
    assert 1 << 20 < available < 1 << 50


def test_locked_memory_below_staging_is_red_for_rdma():
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, limits[1]))
    try:
        over = {
            url: {f.subject: f for f in check_limits(read_settings(store=url), 0)}
            for url in ("mooncake://h:1?protocol=rdma", "mooncake://h:1?protocol=tcp")
        }
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    rdma, tcp = over.values()
    assert rdma["locked memory"].level is Level.BAD
    assert "ulimit -l unlimited" in rdma["locked memory"].remedy
    assert "locked memory" not in tcp


def test_few_open_files_are_yellow():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        [finding] = check_limits(read_settings(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (finding.subject, finding.level) == ("open files", Level.WARN)


def test_an_arena_is_recommended_where_there_are_gpus():
    def subjects(store, num_gpus):
        return {f.subject for f in check_limits(read_settings(store=store), num_gpus)}

    assert "arena" in subjects("file://", 2)
    assert "arena" not in subjects("file://", 0) | subjects("shm://a", 2)


def test_no_native_library_is_yellow():
    [finding] = check_native(read_settings(native="off"), lambda: 0)
    assert finding.level is Level.WARN
    assert "PDSTORE_NATIVE=off" in finding.said
