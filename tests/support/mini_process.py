"""The mini engine as a process, of this checkout or of another one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from examples.make_checkpoint import ROOT
from examples.ports import free_port
from tests.support.child import child
from tests.support.kv import eventually
from tests.support.mini_engine_kit import DEADLINE_S


class MiniProcess:
    """A process of the mini engine; what it prints goes to a file of its name."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        directory: Path,
        role: str,
        checkpoint: Path,
        *,
        checkout: Path = ROOT,
        **variables: str,
    ) -> None:
        self.port = free_port()
        self._log = directory / f"{role}.log"
        self._url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "examples.mini_engine", "--model", checkpoint]
        command += ["--port", str(self.port), "--num-blocks", "64"]
        own = {**os.environ, "PYTHONPATH": str(checkout)}
        environment = {**own, **variables, "PDSTORE_ROLE": role}
        output = stack.enter_context(self._log.open("wb"))
        self._process = stack.enter_context(
            child(command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT)
        )

    def wait_ready(self) -> None:
        """Returns when it serves; a failure shows its log."""
        eventually(self._is_ready, DEADLINE_S, lambda: self.log)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log
        try:
            return httpx.get(f"{self._url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, **body) -> httpx.Response:
        body = {"max_tokens": 6, "return_token_ids": True, **body}
        return httpx.post(f"{self._url}/v1/completions", json=body, timeout=DEADLINE_S)

    @property
    def metrics(self) -> str:
        return httpx.get(f"{self._url}/metrics").text

    @property
    def log(self) -> str:
        """Returns all that it has printed."""
        return self._log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)
        self._process.wait(DEADLINE_S)


_WITHOUT_EDITABLE = """
# an editable installation of this checkout comes before the directory of the other one
import sys
sys.meta_path = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
"""


def other_version(directory: Path, *, is_format_equal: bool = False) -> Path:
    """Makes a checkout of another version of pdstore, by default with another stored format.

    The file's line of the format is changed, so that no history is needed.
    """
    checkout = directory / "checkout"
    for name in ("pdstore", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    changes = [("__init__.py", '\n__version__ = "', '\n__version__ = "9')]
    if not is_format_equal:
        changes.append(("format/keys.py", "\nFORMAT_VERSION = ", "\nFORMAT_VERSION = 9"))
    for name, before, after in changes:
        file = checkout / "pdstore" / name
        text = file.read_text()
        assert text.count(before) == 1
        file.write_text(text.replace(before, after))
    (checkout / "sitecustomize.py").write_text(_WITHOUT_EDITABLE)
    return checkout
