"""find_checkpoint: a directory, or the hub's cache of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdstore.format.weights import find_checkpoint


@pytest.mark.parametrize("name", ["org/not-in-the-cache", "/missing/directory", "a/b/c"])
def test_what_is_on_no_path_and_not_in_the_cache_is_not_found(name):
    assert find_checkpoint(name) is None


def test_a_hub_name_is_its_snapshot_in_the_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub.file_download")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    found = find_checkpoint("org/name")
    assert found is not None
    assert Path(found) == snapshot
