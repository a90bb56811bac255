"""python -m pdstore doctor: a right store passes, a wrong one is told at its step."""

from __future__ import annotations

import pytest

from pdstore.cli import doctor as module
from pdstore.cli.main import main
from pdstore.settings import read_settings
from pdstore.store import open_store


@pytest.mark.parametrize("where", ["file", "redis"])
def test_a_right_store_passes_every_step(where, request, tmp_path, capsys):
    url = f"file://{tmp_path}/pool" if where == "file" else request.getfixturevalue("redis_url")
    assert main(["doctor", "--store", url]) == 0
    out = capsys.readouterr().out
    for step in ("connect", "put 4 KiB", "match", "get and verify", "remove", "pool"):
        assert step in out


def test_a_store_that_is_not_there_is_one_line(capsys):
    assert main(["doctor", "--store", "redis+unix:///nowhere/redis.sock"]) == 2
    assert capsys.readouterr().err.startswith("pdstore: redis+unix:///nowhere")


def test_a_wrong_store_is_told_at_its_step(monkeypatch, capsys):
    settings = read_settings(store="memory://")
    inner = open_store("memory://", settings)
    monkeypatch.setattr(inner, "remove", lambda keys: None)
    monkeypatch.setattr(module, "open_store", lambda url, settings: inner)
    assert main(["doctor", "--store", "memory://"]) == 2
    assert "remove gave a wrong result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "num_gpus", "recommends"),
    [
        ("file", 2, True),
        ("file", 0, False),
        ("shm", 2, False),
    ],
)
def test_an_arena_is_recommended_where_there_are_gpus(scheme, num_gpus, recommends, tmp_path):
    url = f"file://{tmp_path}/pool" if scheme == "file" else f"shm://a?size=8MiB&dir={tmp_path}"
    notes = module.doctor(url, lambda: num_gpus).notes
    assert any("shm://" in note for note in notes) == recommends
