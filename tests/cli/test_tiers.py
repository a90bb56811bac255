"""The command over a pool of several tiers: each tier is tried and shown, and none is forgotten."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pdstore.cli.listing import open_pool
from pdstore.errors import ConfigError
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.optional import ListsValues, tiers_of
from tests.support.command import run, run_json, save


@pytest.fixture
def stack(tmp_path, prompts):
    """The URLs of an arena over files, with two prompts whose blocks are in both."""
    urls = f"shm://cli?size=64MiB&dir={tmp_path} file://{tmp_path}/below?budget=1GiB&copy=1GB/s"
    with contextlib.closing(open_store(urls, read_settings())) as store:
        for keys in prompts:
            save(store, keys)
        assert store.flush()
    return urls


def keys_in(urls):
    with contextlib.closing(open_store(urls, read_settings())) as store:
        return [
            {value.key for value in tier.optional(ListsValues).stored_values()}
            for tier in tiers_of(store)
        ]


def test_doctor_tries_each_tier(stack, tmp_path):
    document = run_json("doctor", "--store", stack, PD_TRANSFER_VIA_STORAGE="1")
    said = {each["subject"]: each for each in document["findings"]}
    assert said["round trip"]["level"] == said["tier 1: round trip"]["level"] == "ok"
    assert said["tier 1"]["said"] == f"file://{tmp_path}/below"
    assert "1.0GiB" in said["tier 1: room"]["said"]
    assert "P and D meet in shm://cli" in said["tiers"]["said"]
    above, below = keys_in(stack)
    assert len(below) == 4, "the blocks of both prompts, and nothing of the trial"
    assert below < above


def test_doctor_names_the_first_tier_as_it_is_called_before_there_is_one(tmp_path):
    urls = f"shm://unopened?size=64MiB&dir={tmp_path} file://{tmp_path}/below"
    document = run_json("doctor", "--store", urls, PD_TRANSFER_VIA_STORAGE="1")
    (said,) = (each["said"] for each in document["findings"] if each["subject"] == "tiers")
    assert said.startswith("P and D meet in shm://unopened;")


def test_doctor_names_a_tier_that_is_away(tmp_path):
    urls = f"file://{tmp_path}/pool?budget=9GiB redis://127.0.0.1:1"
    ran = run("doctor", "--store", urls)
    assert ran.status == 1
    (line,) = (line for line in ran.out.splitlines() if line.startswith("✗  tier 1"))
    assert "127.0.0.1:1" in ran.out
    assert "connect" in line


def test_du_counts_a_value_once_and_shows_the_room_of_each_tier(stack, tmp_path):
    document = run_json("du", "--store", stack)
    assert [use["blocks"] for use in document["namespaces"]] == [2, 2]
    assert [tier["store"] for tier in document["tiers"]] == [
        "shm://cli",
        f"file://{tmp_path}/below",
    ]
    assert [tier["room"]["capacity_bytes"] for tier in document["tiers"]] == [64 << 20, 1 << 30]
    lines = run("du", "--store", stack).out.splitlines()
    assert sum("% of" in line for line in lines) == 2


def test_ls_and_inspect_see_what_is_only_below(stack, prompts):
    above, below = keys_in(stack)
    first = stack.partition(" ")[0]
    with contextlib.closing(open_store(first, read_settings())) as arena:
        arena.remove(list(below))
    listed = run_json("ls", "--store", stack, "--limit", "0")
    assert {value["key"] for value in listed["values"]} == above
    for key in below:
        assert run_json("inspect", "--store", stack, key)["verdict"] == "right"


def test_purge_reaches_each_tier(stack, prompts):
    one, other = (keys.namespace.hex for keys in prompts)
    run("purge", "--namespace", one, "--store", stack)
    for keys in keys_in(stack):
        assert not any(one in key for key in keys)
        assert any(other in key for key in keys)


@pytest.mark.parametrize("there", ["neither", "above"])
def test_looking_makes_no_tier(tmp_path, there):
    first = f"shm://cli?size=8MiB&dir={tmp_path}"
    if there == "above":
        open_store(first, read_settings()).close()
    before = [*tmp_path.iterdir()]
    with (
        pytest.raises(ConfigError, match="there is no pool in"),
        open_pool(f"{first} file://{tmp_path}/below"),
    ):
        pass
    assert [*tmp_path.iterdir()] == before
    assert not Path(tmp_path, "below").exists()
