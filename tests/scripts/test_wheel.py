"""The wheel with each Python here, and in a bare Debian beside vLLM; the release workflow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()
VERSIONS = ("3.10", "3.12", "3.13")  # 3.11 is CI's, 3.14 the release workflow's
WHEEL = (ROOT / ".ci/wheel").read_text()
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def python_of(version: str) -> str | None:
    """The program of a Python version: of pyenv, or on the PATH."""
    own = sorted(PYENV.glob(f"{version}.*/bin/python{version}"))
    return str(own[-1]) if own else shutil.which(f"python{version}")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of pdstore and of its adapter of LMCache."""
    place = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", place]
    environment = {**os.environ, "CMAKE_ARGS": "-DPDSTORE_CUDA=OFF"}
    subprocess.run([*command, ".", "./integrations/lmcache"], cwd=ROOT, env=environment, check=True)
    return [str(next(place.glob(f"{name}-*.whl"))) for name in ("pdstore", "pdstore_lmcache")]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_readmes_lines_run_from_the_wheel_with_every_python(version, wheels):
    python = python_of(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    script = [ROOT / "scripts/try_wheel.sh", *wheels]
    environment = {**os.environ, "PYTHON": python}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_in_a_bare_debian_the_page_of_vllm_runs_as_it_stands(wheels):
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")
    make = [sys.executable, "-m", "examples.make_checkpoint"]
    model = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    command = [ROOT / ".ci/wheel", wheels[0], model.stdout.split()[-1]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-30000:]  # servers' logs
    assert "D loaded" in done.stdout


def test_the_page_of_vllm_is_three_servers_with_all_their_options():
    code = re.search(r"page\.py\" <<'PYTHON'\n(.*?)^PYTHON$", WHEEL, re.MULTILINE | re.DOTALL)[1]
    command = [sys.executable, "-c", code]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    p, d, router = [line for line in script.splitlines() if line.endswith("&")]
    assert p.startswith("PDSTORE_ROLE=prefill vllm serve /srv/pdstore/model ")
    assert d.startswith("PDSTORE_ROLE=decode vllm serve /srv/pdstore/model ")
    assert "--prefill http" in router
    assert "--decode http" in router


def test_a_release_is_built_by_make_tried_with_every_python_and_only_then_published():
    jobs = re.split(r"^  (\w+):$", WORKFLOW.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]
    text = dict(zip(jobs[::2], jobs[1::2], strict=True))
    assert list(text) == ["build", "try", "publish"]
    assert "run: make release" in text["build"]
    assert "needs: build" in text["try"]
    assert "needs: try" in text["publish"]
    project = (ROOT / "pyproject.toml").read_text()
    classified = re.findall(r"Python :: (3\.[0-9]+)", project)
    tried = re.findall(r'"(3\.[0-9]+)"', re.search(r"python: \[(.*)\]", text["try"])[1])
    assert {*classified, "3.11", *VERSIONS} <= set(tried)


def test_a_release_needs_no_secret_and_is_attested():
    assert "id-token: write" in WORKFLOW
    assert "attestations: write" in WORKFLOW
    assert "secrets." not in WORKFLOW
    assert "password" not in WORKFLOW
    assert WORKFLOW.count("id-token: write") == 1, "only the job that publishes may sign"
