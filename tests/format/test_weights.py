"""The weights' revision: content decides, also where only samples of a large file are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdstore.errors import ConfigError
from pdstore.format.weights import file_digest, find_checkpoint, weights_revision
from pdstore.settings import read_settings

SETTINGS = read_settings()
MIB = 1 << 20


def checkpoint(directory, content=b"weights", name="model.safetensors"):
    directory.mkdir(parents=True)
    (directory / name).write_bytes(content)
    (directory / "config.json").write_text("{}")
    return directory


def test_equal_files_at_another_path_are_one_revision(tmp_path):
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert weights_revision(a, SETTINGS) == weights_revision(b, SETTINGS)


@pytest.mark.misconfiguration("weights were changed under the same name")
def test_one_config_and_other_weights_are_two_revisions(tmp_path):
    a, b = checkpoint(tmp_path / "a" / "m"), checkpoint(tmp_path / "b" / "m", b"Weights")
    assert weights_revision(a, SETTINGS) != weights_revision(b, SETTINGS)


def test_a_name_wins_over_the_files_and_a_hubs_snapshot_has_one(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = checkpoint(tmp_path / "snapshots" / commit)
    assert weights_revision(snapshot, read_settings(weights="step-7")) == "step-7"
    assert weights_revision(snapshot, SETTINGS) == "commit:" + commit
    with pytest.raises(ConfigError, match="PDSTORE_WEIGHTS"):
        weights_revision(tmp_path, SETTINGS)


def write_safetensors(path: Path, sizes: dict[str, int]) -> dict[str, int]:
    """Writes a sparse file of zeros; returns where each tensor begins in it."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = (end, end + size)
        end += size
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {
            n: {"dtype": "U8", "shape": [e - b], "data_offsets": [b, e]}
            for n, (b, e) in offsets.items()
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return {name: 8 + len(header) + begin for name, (begin, _) in offsets.items()}


def fill(path: Path, begin: int, size: int):
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(b"\x3f" * size)


SIZES = {"embed": 900 * MIB, "norm": 8192, "up": 7 * MIB, "gate": MIB // 2, "head": 1200 * MIB}


@pytest.mark.parametrize("name", ["norm", "up", "gate"])
def test_one_changed_tensor_of_a_file_of_2_gib_is_another_digest(tmp_path, name):
    path = tmp_path / "model.safetensors"
    begins = write_safetensors(path, SIZES)
    assert path.stat().st_size > 2 << 30
    before = file_digest(path)
    fill(path, begins[name], SIZES[name])
    assert file_digest(path) != before


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
@pytest.mark.parametrize(
    "begin",
    [
        (1 << 62).to_bytes(8, "little"),
        (20).to_bytes(8, "little") + b"not json at all.....",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"x": 1}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_every_byte_of_a_file_that_is_not_safetensors_counts(tmp_path, name, begin):
    path = tmp_path / name
    path.write_bytes(begin + bytes(3 * MIB))
    before = file_digest(path, whole_up_to=0)
    fill(path, len(begin) + 2 * MIB + 12345, 1)
    assert file_digest(path, whole_up_to=0) != before


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
