"""`pdstore purge` forgets one namespace and nothing else, and a rehearsal forgets nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pdstore.cli.clearing import clear
from pdstore.errors import ConfigError
from pdstore.settings import read_settings
from pdstore.store import open_store
from tests.support.command import namespaces, run, run_json, save

PLUGIN = Path(__file__).parents[2] / "examples" / "store_plugin"


def test_one_namespace_goes_and_the_other_stays(filled, prompts):
    gone, kept = (keys.namespace.hex for keys in prompts)
    document = run_json("purge", "--namespace", gone[:8], "--store", filled)
    assert (document["namespace"], document["num_values"], document["cleared"]) == (gone, 3, True)
    assert namespaces(filled) == {kept}


def test_a_rehearsal_forgets_nothing(filled, prompts):
    name = prompts[0].namespace.hex
    ran = run("purge", "--namespace", name, "--dry-run", "--store", filled)
    assert ran.out.startswith("would forget 3 values")
    assert namespaces(filled) == {keys.namespace.hex for keys in prompts}


@pytest.mark.parametrize("beginning", ["", "xyz", "g" * 32])
def test_no_namespace_or_several_are_refused(filled_file, prompts, beginning):
    with pytest.raises(ConfigError, match="namespace"):
        clear(filled_file, beginning, is_rehearsal=False)
    assert len(namespaces(filled_file)) == 2


@pytest.fixture
def sqlite(tmp_path, monkeypatch):
    """The URL of an installed plug-in's store, which has `clear` and cannot list its values."""
    info = tmp_path / "pdstore_sqlite-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdstore-sqlite\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[pdstore.stores]\nsqlite = pdstore_sqlite:SQLiteStore\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PLUGIN)
    return f"sqlite://{tmp_path}/pool.db"


def test_a_store_that_cannot_list_is_cleared_by_the_whole_name(sqlite, prompts):
    with contextlib.closing(open_store(sqlite, read_settings())) as store:
        for keys in prompts:
            save(store, keys)
        gone, kept = (keys.namespace.hex for keys in prompts)
        ran = run("purge", "--namespace", gone, "--store", sqlite)
        assert (ran.status, ran.out) == (0, f"forgot all of {gone} in {store.label}\n"), ran.err
        found = [
            store.match(keys.store_keys(keys.namespace.parts, 0, len(keys))) for keys in prompts
        ]
        assert found == [0, len(prompts[1])]
        document = run_json("purge", "--namespace", kept, "--dry-run", "--store", sqlite)
        assert (document["num_values"], document["cleared"]) == (None, False)


def test_a_store_that_cannot_list_asks_for_the_whole_name(sqlite, prompts):
    ran = run("purge", "--namespace", prompts[0].namespace.hex[:8], "--store", sqlite)
    assert ran.status == 2
    assert "cannot list its namespaces: give all 32 digits" in ran.err
