"""The weights' revision: content decides, names and paths do not."""

from __future__ import annotations

import pytest

from pdstore.errors import ConfigError
from pdstore.format import weights
from pdstore.format.weights import weights_revision
from pdstore.settings import read_settings

SETTINGS = read_settings()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(directory, content=b"weights", name="model.safetensors"):
    directory.mkdir(parents=True)
    (directory / name).write_bytes(content)
    (directory / "config.json").write_text("{}")
    return directory


def test_equal_files_at_another_path_are_one_revision(tmp_path):
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert weights_revision(a, SETTINGS) == weights_revision(b, SETTINGS)


def test_one_config_and_other_weights_are_two_revisions(tmp_path):
    a, b = checkpoint(tmp_path / "a" / "m"), checkpoint(tmp_path / "b" / "m", b"Weights")
    assert weights_revision(a, SETTINGS) != weights_revision(b, SETTINGS)


def test_a_file_that_changes_is_read_again(tmp_path):
    a = checkpoint(tmp_path / "a")
    before = weights_revision(a, SETTINGS)
    (a / "model.safetensors").write_bytes(b"other weights")
    assert weights_revision(a, SETTINGS) != before


def test_an_unchanged_file_is_read_once(tmp_path, monkeypatch):
    a = checkpoint(tmp_path / "a")
    before = weights_revision(a, SETTINGS)
    monkeypatch.setattr(weights, "file_digest", None)
    assert weights_revision(a, SETTINGS) == before


def test_the_setting_wins(tmp_path):
    assert weights_revision(tmp_path, read_settings(weights="step-7")) == "step-7"


def test_a_hub_snapshot_is_named_by_its_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    a = checkpoint(tmp_path / "snapshots" / commit)
    assert weights_revision(a, SETTINGS) == "commit:" + commit


def test_no_weight_files_says_what_to_set(tmp_path):
    with pytest.raises(ConfigError, match="PDSTORE_WEIGHTS"):
        weights_revision(tmp_path, SETTINGS)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_revision(checkpoint(tmp_path / "a"), SETTINGS).startswith("sha256:")


@pytest.mark.parametrize("text", ["[1]", "not json", "7"])
def test_a_damaged_cache_costs_a_second_look(tmp_path, text):
    (tmp_path / "cache" / "pdstore").mkdir(parents=True)
    (tmp_path / "cache" / "pdstore" / "weights.json").write_text(text)
    assert weights_revision(checkpoint(tmp_path / "a"), SETTINGS).startswith("sha256:")
