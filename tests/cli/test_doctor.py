"""`pdstore doctor`: green where P and D would work, red with a remedy where they would not."""

from __future__ import annotations

import json
import resource

import pytest

from pdstore.cli.doctor import doctor
from tests.support.command import run, run_json

LLAMA_8B = {
    **{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}


def found(document, level):
    return {f["subject"]: f for f in document["findings"] if f["level"] == level}


def test_a_right_pool_has_nothing_red(filled):
    document = run_json("doctor", "--store", filled, PD_TRANSFER_VIA_STORAGE="1")
    assert found(document, "bad") == {}
    assert {"round trip", "speed", "staging"} <= set(found(document, "ok"))


@pytest.mark.misconfiguration("redis' `maxmemory` is too small")
def test_a_redis_of_1500_kb_is_red(redis_server):
    url = redis_server("--maxmemory", "1500kb").url
    ran = run("doctor", "--store", url)
    assert ran.status == 1
    assert "✗  room" in ran.out
    assert "less than one prompt" in ran.out


def test_every_finding_that_is_red_or_yellow_has_a_remedy():
    document = run_json(
        *("doctor", "--store", "memory://"), PDSTORE_STAGING="4TiB", PDSTORE_BLOCK_TOKENS="24"
    )
    assert {"place", "staging", "block size"} <= set(found(document, "bad"))
    assert all(f["remedy"] for f in document["findings"] if f["level"] in ("warn", "bad"))


def test_a_store_that_is_away_is_red_at_its_first_step():
    ran = run("doctor", "--store", "redis+unix:///nowhere/redis.sock")
    assert ran.status == 1
    assert "✗  connect" in ran.out


@pytest.mark.misconfiguration("`shm://` with slabs smaller than a block's value")
def test_an_arena_whose_slabs_hold_no_block_of_the_model_is_red(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    url = f"shm://small?size=8MiB&slab=1MiB&dir={tmp_path}"
    document = doctor(url, model=str(config), count_gpus=lambda: 0).document
    assert "?slab=4.0MiB" in found(document, "bad")["block size"]["said"]


def test_a_look_leaves_no_arena_behind(tmp_path):
    url = f"shm://small?size=64MiB&dir={tmp_path}"
    document = doctor(url, count_gpus=lambda: 0).document
    assert list(tmp_path.iterdir()) == []
    assert "the first P or D makes it" in found(document, "info")["pool"]["said"]
    assert "round trip" in found(document, "ok")


def test_a_full_file_system_has_the_remedy_of_its_cause(file_url):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        document = doctor(file_url, count_gpus=lambda: 0).document
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "raise ulimit -f" in found(document, "bad")["room"]["remedy"]


@pytest.mark.misconfiguration("a `?budget=` above its file system")
def test_a_budget_above_its_file_system_is_yellow_with_what_to_write(tmp_path):
    document = run_json("doctor", "--store", f"file://{tmp_path}/pool?budget=1000TiB")
    finding = found(document, "warn")["budget"]
    assert finding["said"].startswith("?budget=1000.0TiB, and its file system has ")
    assert finding["remedy"].startswith("write ?budget=")
    assert "1000.0TiB" not in found(document, "ok")["room"]["said"]


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TOKENS` that no prompt fills")
def test_blocks_longer_than_the_models_prompts_are_yellow(tmp_path, file_url):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": 8192}))
    document = run_json(
        *("doctor", "--store", file_url, "--model", str(config)), PDSTORE_BLOCK_TOKENS="65536"
    )
    assert "no prompt has over 8192" in found(document, "warn")["settings"]["said"]


@pytest.mark.misconfiguration("quotes in the URL, as docker's `--env-file` leaves them")
@pytest.mark.misconfiguration("blanks or line ends around the URL")
@pytest.mark.misconfiguration("`;budget=5GiB` for `?budget=5GiB`")
@pytest.mark.parametrize("url", ['"file:///pool"', "file:///pool ", "file:///pool;budget=5GiB"])
def test_a_url_that_is_not_what_was_meant_is_one_line_with_what_to_write(url):
    ran = run("doctor", PDSTORE_STORE=url)
    assert ran.status == 2
    assert f"bad store URL {url!r}: " in " ".join(ran.err.split())
