"""A draft model: its KV is handed over with the model's, and only to a D that has one too."""

from __future__ import annotations

import json

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, assert_idle, new_prompt, prefill
from tests.adapters.vllm.conftest import switched_on
from tests.support.vllm_draft import make_draft

LENGTHS = (2, 63, 64, 65, 300, 900)


@pytest.fixture
def start(launcher, checkpoints, tmp_path):
    """Starts instances with a draft model, or without: `start(p=draft, d=None)`."""
    servers = []

    def start(**drafts):
        for name, draft in drafts.items():
            spec = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
            options = [f"--speculative-config={json.dumps(spec)}"] if draft else []
            env = switched_on(f"file://{tmp_path / 'pool'}", {"p": "prefill"}.get(name, "decode"))
            servers.append(launcher.vllm(name, checkpoints("llama"), *options, env=env))
        return [server.wait_ready() for server in servers]

    yield start
    for server in servers:
        server.stop()


def misses_named(server):
    lines = server.log.read_text().splitlines()
    return [line for line in lines if "does not fit" in line]


@pytest.mark.nightly
def test_eagle_s_kv_is_handed_over_and_a_d_without_it_misses(start, tmp_path):
    draft, other = (make_draft(tmp_path / name / "draft", seed) for seed, name in enumerate("ab"))
    p, d, plain, other_d = start(p=draft, d=draft, plain=None, other=other)
    for num_tokens in LENGTHS:
        prompt = new_prompt(num_tokens)
        since = Since(d)
        answer = ask(d, prompt, 20, kv_transfer_params=prefill(p, prompt))
        assert since.loaded == num_tokens
        assert since.computed <= 1
        assert since["vllm:spec_decode_num_drafts_total"] > 0
        answer.assert_same(alone(d, prompt, 20))
        assert answer.ids == alone(plain, prompt, 20).ids
    for server, field in ((plain, "draft_layers"), (other_d, "weights")):
        prompt = new_prompt(300)
        params = prefill(p, prompt)
        since = Since(server)
        ask(server, prompt, kv_transfer_params=params).assert_same(alone(server, prompt))
        assert since.loaded == 0
        assert since["pdstore_misses_total:namespace"] == 1
        [line] = misses_named(server)
        assert field in line
    for server in (p, d):
        assert_idle(server)
