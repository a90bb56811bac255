"""Virtual environments with packages of their own, which find all else where this Python does."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def python_beside(home: Path, *arguments: str, timeout_s: float) -> Path:
    """Makes an environment in a new directory and returns its Python.

    arguments: of `pip install`, which does not see the packages of this environment.
    """
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=120)
    program = home / "bin" / "python"
    install(program, *arguments, timeout_s=timeout_s)
    (packages_of(home) / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return program


def install(python: Path, *arguments: str, timeout_s: float) -> None:
    """Runs `pip install`; what it prints is shown if it fails."""
    pip = [python, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr


def packages_of(home: Path) -> Path:
    """Returns the directory of an environment's own packages."""
    [site] = home.glob("lib/python*/site-packages")
    return site
