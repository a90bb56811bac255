"""The demo's Mooncake, and examples/run_mooncake.sh: both start a pool that works, and stop it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import mooncake_pool, processes
from examples.demo.processes import DemoError, Processes
from examples.ports import free_ports
from pdstore.settings import Settings
from pdstore.store import open_store
from tests.support.child import child
from tests.support.kv import eventually
from tests.support.mooncake_cluster import need_mooncake, wait_until_it_serves

pytestmark = pytest.mark.mooncake
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "run_mooncake.sh"


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    need_mooncake()
    monkeypatch.setattr(processes, "LOGS", tmp_path)


def works(url: str) -> None:
    with contextlib.closing(open_store(url, Settings())) as store:
        wait_until_it_serves(store)


def test_the_demos_pool_works_and_leaves_nothing_behind():
    with Processes() as running:
        url = mooncake_pool.start_mooncake(running, segment="64MB")
        pids = [process.popen.pid for process in running.running]
        assert len(pids) == 2
        works(url)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_demo_says_what_is_not_installed(monkeypatch, tmp_path):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: ...')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Processes() as running, pytest.raises(DemoError) as caught:
        mooncake_pool.start_mooncake(running)
    assert "apt-get install libibverbs1" in str(caught.value)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_script_starts_a_pool_and_a_signal_ends_all_of_it(number, status):
    port, client, metrics = free_ports(3)
    command = [SCRIPT, "--port", port, "--client-port", client, "--metrics-port", metrics]
    with child(
        [*map(str, command), "--segment", "64MB"],
        env={**os.environ, "PYTHON": sys.executable},
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        said = "".join(_until_ready(script))
        children = eventually(lambda: children_of(script.pid))
        for url in re.findall(r"PDSTORE_STORE='(.*)'", said):
            works(url)
        script.send_signal(number)
        assert script.wait(15) == status
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def children_of(pid: int) -> list[str] | None:
    """The master and four holders, once the script has no other child for a moment."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return children if len(children) == 5 else None


def _until_ready(script) -> list[str]:
    lines = []
    while "PDSTORE_STORE=" not in (lines or [""])[-1]:
        lines.append(script.stderr.readline())
        assert lines[-1], "".join(lines)
    return lines
