"""A real browser without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(
    not shutil.which("chromium"), reason="needs Debian's package chromium"
)


def shown(url: str, scratch: Path, *more: str) -> str:
    """Returns the page as a browser shows it after its scripts have run."""
    command = [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=3000", *more),
    ]
    return subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True).stdout
