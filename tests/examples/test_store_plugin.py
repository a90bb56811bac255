"""examples/store_plugin: installed by pip, found by its URL, and right by its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "store_plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a Python that has the package installed."""
    target = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*install, *options, PLUGIN], check=True, timeout=100)
    return {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}"}


@pytest.mark.timeout(300)  # 20 s of work, by a second pytest
def test_it_passes_its_own_tests(environment):
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", PLUGIN / "tests"]
    done = subprocess.run(
        run, env=environment, cwd=PLUGIN, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_tries_it_by_its_url(environment, tmp_path):
    url = f"sqlite://{tmp_path}/pool.db"
    doctor = [sys.executable, "-m", "pdstore", "doctor", "--store", url]
    done = subprocess.run(doctor, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path}/pool.db" in done.stdout
