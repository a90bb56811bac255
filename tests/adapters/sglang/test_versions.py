"""Each version of SGLang that pdstore supports, tried by the classes of its own wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

RELEASES = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")

pytestmark = pytest.mark.nightly


@pytest.fixture(params=RELEASES)
def wheel(request) -> Path:
    """The wheel of a release, downloaded once into pytest's cache, in a directory of its own."""
    release = request.param
    directory = Path(request.config.cache.mkdir(f"sglang-{release}"))
    if not list(directory.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(directory), f"sglang=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, f"SGLang {release} could not be downloaded: {done.stderr}"
    (found,) = directory.glob("*.whl")
    return found


def test_the_documents_name_these_releases():
    from pdstore.adapters.sglang.pages import VERSIONS

    assert f"{RELEASES[0]} to {RELEASES[-1]}" == VERSIONS
    assert f"pdstore supports SGLang {VERSIONS}." in (ROOT / "docs" / "sglang.md").read_text()


def test_all_that_is_tested_holds_with_this_release(wheel):
    """The tests beside this one, in a process of their own; none of them may be skipped."""
    here = Path(__file__).relative_to(ROOT)
    chosen = ["-p", "no:cacheprovider", "-m", "not nightly or redis", f"--ignore={here}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, str(here.parent)],
        cwd=ROOT,
        env={**os.environ, "TEST_SGLANG_WHEELS": str(wheel.parent)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]
