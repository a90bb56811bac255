"""Ray Serve in front of two vLLMs, P and D, in an environment of its own beside this one's vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from examples.ports import free_port
from tests.adapters.vllm.asking import new_prompt
from tests.docs.commands import ROOT
from tests.support.beside import python_beside

PACKAGES = (
    "ray[serve]==2.60.0",
    "fastapi==0.133.0",  # with 0.165, each request to Ray 2.60 lacks a field `self`
    *("pyarrow", "pandas", "fsspec", "jsonref", "typer", "hf_transfer"),
)
"""What `ray[llm]` has, without its own vLLM and NIXL, which want a GPU."""

INSTALL_S, RUN_S = 600, 900

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(INSTALL_S + RUN_S)]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A Python with Ray, which finds all else where this one does."""
    return python_beside(tmp_path_factory.mktemp("ray") / "venv", *PACKAGES, timeout_s=INSTALL_S)


def test_d_loads_what_p_has_saved_behind_ray_serve(python, checkpoints, tmp_path):
    options = {
        "--model": str(checkpoints("llama")),
        "--store": f"file://{tmp_path}/pool",
        "--port": str(free_port()),
        "--prompt": json.dumps(new_prompt(300)),
    }
    command = [python, "-m", "tests.support.ray_serving"]
    with tempfile.TemporaryDirectory() as short:  # the paths of Ray's sockets must be
        options["--temporary"] = short
        done = subprocess.run(
            [*command, *(part for option in options.items() for part in option)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
        )
    assert "ANSWER 200" in done.stdout, done.stdout[-8000:]
    assert "(0 matched, 0 loaded, 300 computed, 300 saved)" in done.stdout, done.stdout[-8000:]
    assert "(300 matched, 299 loaded, 1 computed, 0 saved)" in done.stdout, done.stdout[-8000:]
