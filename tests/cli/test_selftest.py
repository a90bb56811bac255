"""`pdstore selftest`: a real hand-over of a layout, and a store that spoils it."""

from __future__ import annotations

import json

import pytest

from pdstore.cli import selftest as module
from pdstore.cli.selftest import selftest
from pdstore.store.memory import MemoryStore
from pdstore.worker.job import Job
from tests.support.command import namespaces, run

SMALL = {
    **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100},
    **{"num_key_value_heads": 2, "intermediate_size": 64},
}
LATENT = SMALL | {
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"q_lora_rank": None, "num_key_value_heads": None},
}


@pytest.fixture
def config(tmp_path):
    def write(document):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(document))
        return str(path)

    return write


def test_every_byte_comes_back_and_nothing_is_left(config, url):
    before = namespaces(url)
    answer = selftest(url, config(SMALL), 150)
    assert (answer.status, answer.document["problem"]) == (0, None)
    assert list(answer.document["seconds"]) == ["save", "find", "load"]
    assert namespaces(url) == before


def test_latent_kv_comes_back_too(config, file_url):
    assert selftest(file_url, config(LATENT), 150).document["problem"] is None


def test_a_redis_that_is_full_is_named(config, redis_server):
    url = redis_server("--maxmemory", "1500kb").url
    problem = selftest(url, config(SMALL), 5000).document["problem"]
    assert problem.startswith("save: ")
    assert "store_full" in problem


def test_a_store_that_is_away_is_one_line():
    ran = run("selftest", "--store", "redis://127.0.0.1:9")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("pdstore: redis://127.0.0.1:9: cannot connect to 127.0.0.1:9: ")
    assert ran.err.count("\n") == 1


def test_no_wait_is_shorter_than_the_jobs_own_deadlines(config, file_url, monkeypatch):
    monkeypatch.setenv("PDSTORE_SAVE_DEADLINE_S", "100")
    monkeypatch.setenv("PDSTORE_LOAD_DEADLINE_S", "200")
    waits, wait = [], Job.wait
    monkeypatch.setattr(Job, "wait", lambda job, s: (waits.append(s), wait(job, s))[1])
    assert selftest(file_url, config(SMALL), 150).status == 0
    saved, loaded = waits
    assert saved > 100
    assert loaded > 200


class Spoils(MemoryStore):
    """Gives another value's bytes: whole, but wrong."""

    def get(self, keys, slots):
        n = super().get(keys, slots)
        if n and slots.sizes[0] > 64:
            slots.value(0)[64:] = bytes(len(slots.value(0)) - 64)
        return n


def test_spoilt_values_are_seen(config, monkeypatch):
    shared = Spoils("memory://spoilt")
    monkeypatch.setattr(
        "pdstore.store.connect.open_store", lambda url, settings: Spoils("memory://spoilt")
    )
    answer = module.selftest("memory://spoilt", config(SMALL), 100)
    shared.close()
    assert answer.status == 1
    assert answer.document["problem"].startswith("load: 0 of 100 tokens (corrupt")
