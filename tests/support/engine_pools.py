"""The stores that an engine's adapter is tried on, by URL."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest


@pytest.fixture(
    params=[
        "file",
        "shm",
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("mooncake", marks=pytest.mark.mooncake),
    ]
)
def store_url(request, tmp_path):
    if request.param == "redis":
        yield request.getfixturevalue("redis_url")
    elif request.param == "mooncake":
        from tests.support.mooncake_cluster import Cluster

        with contextlib.closing(Cluster(tmp_path)) as cluster:
            yield cluster.url
    else:
        yield {"file": f"file://{tmp_path}/pool", "shm": f"shm://p?size=8MiB&dir={tmp_path}"}[
            request.param
        ]


def files_of(directory: Path) -> list[Path]:
    """Returns the files of a pool's blocks."""
    return [file for file in directory.rglob("pds1:*") if file.name != "pds1:pool"]
