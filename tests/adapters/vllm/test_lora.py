"""LoRA adapters whose files are replaced: D never gets KV of the earlier files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.adapters.vllm.asking import ANSWER_S, Since, ask, assert_idle, new_prompt
from tests.adapters.vllm.conftest import CACHING, switched_on

LONG = 300
REMOTE = {"do_remote_decode": True}
SHAPES = {"q_proj": (128, 128), "k_proj": (64, 128), "v_proj": (64, 128), "o_proj": (128, 128)}
"""The tiny Llama's projections: outputs, inputs."""
OPTIONS = (*CACHING, "--enable-lora", "--max-loras=1", "--max-cpu-loras=1", "--max-lora-rank=8")
"""With room for one adapter, vLLM loads an adapter again when another was used meanwhile."""
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PDSTORE_SAVE_DECODED": "0"}


def make_adapter(directory: Path, seed: int) -> Path:
    """Writes an adapter that changes every layer's attention."""
    directory.mkdir()
    chance, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for module, (outputs, inputs) in SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = 0.3 * torch.randn(8, inputs, generator=chance)
            weights[f"{name}.lora_B.weight"] = 0.3 * torch.randn(outputs, 8, generator=chance)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(SHAPES)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def adapters(tmp_path):
    """Two adapters, and a third one whose files are those of the first."""
    first, other = (make_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b")))
    return [first, other, Path(shutil.copytree(first, tmp_path / "r"))]


@pytest.fixture
def pair(launcher, checkpoints, tmp_path, adapters):
    """P and D with the three adapters a, b and r."""
    named = [f"{path.name}={path}" for path in adapters]
    url, model = f"file://{tmp_path}/pool", checkpoints("llama")
    servers = [
        launcher.vllm(
            f"lora-{role}",
            model,
            *OPTIONS,
            "--lora-modules",
            *named,
            env=switched_on(url, role) | ENVIRONMENT,
        )
        for role in ("prefill", "decode")
    ]
    yield [server.wait_ready() for server in servers]
    for server in servers:
        server.stop()


def loaded_anew(server, name, path):
    """Makes a server forget an adapter, and load it again under a new number."""
    for call, body in (
        ("unload_lora_adapter", {"lora_name": name}),
        ("load_lora_adapter", {"lora_name": name, "lora_path": str(path)}),
    ):
        url = f"{server.url}/v1/{call}"
        response = httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False)
        assert response.status_code == 200, response.text


def loads(d, prompt, name, **more):
    """Returns how many tokens D loads; its answer is right."""
    since = Since(d)
    answer = ask(d, prompt, model=name, **more)
    num_loaded = since.loaded
    answer.assert_same(ask(d, prompt, model=name, cache_salt=f"alone {name}"))
    return num_loaded


@pytest.mark.nightly
@pytest.mark.parametrize("has_new_number", [True, False])
def test_files_replaced_in_place_give_d_nothing_of_the_earlier_ones(pair, adapters, has_new_number):
    (p, d), prompt = pair, new_prompt(LONG)
    asked = ask(p, prompt, 1, model="r", kv_transfer_params=REMOTE)
    assert asked.params is not None
    assert_idle(p)
    assert loads(d, prompt, "a") == LONG, "a has the same files"
    shutil.copy(adapters[1] / "adapter_model.safetensors", adapters[2])
    for server in pair:
        ask(server, new_prompt(8), 1, model="b")  # evicts the others
        if has_new_number:
            loaded_anew(server, "r", adapters[2])
    other = new_prompt(LONG)
    for each in (prompt, other):
        again = ask(p, each, 1, model="r", kv_transfer_params=REMOTE)
        assert again.params is None, "P bypasses the pool"
    assert_idle(p)
    for each in (prompt, other):
        assert loads(d, each, "r") == loads(d, each, "b") == 0
