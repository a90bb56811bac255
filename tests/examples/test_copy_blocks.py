"""examples/copy_blocks.py: block copies without a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("native", ["auto", "off"])
def test_blocks_are_copied_to_the_host_and_back(native: str) -> None:
    done = subprocess.run(
        [sys.executable, "examples/copy_blocks.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PDSTORE_NATIVE": native},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the blocks are equal" in done.stdout
    assert ("TORCH" in done.stdout) == (native == "off")
