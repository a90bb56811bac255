"""P and D on two hosts that share a directory: D's kernel keeps for 30 s that a name is missing."""

from __future__ import annotations

import contextlib
import re
import sys
import time

import httpx
import pytest

from examples.make_checkpoint import ROOT
from examples.ports import free_port
from tests.support.child import child
from tests.support.fuse_mount import mounted
from tests.support.mini_engine_kit import DEADLINE_S, prompt_of, until
from tests.support.mini_process import MiniProcess

# as NFS is mounted by default
REMEMBERS = {"negative_timeout": 30, "entry_timeout": 1, "attr_timeout": 1}
SOON_S = 8.0
"""Seconds for a request; D gives a hand-off up after 10."""


@pytest.fixture
def hosts(tmp_path, checkpoints):
    """Processes of P and D, and a function that starts a router in front of them."""
    with contextlib.ExitStack() as stack:
        p_disk = stack.enter_context(mounted(tmp_path / "p"))
        d_disk = stack.enter_context(mounted(tmp_path / "d", p_disk.behind, REMEMBERS))
        engines = [
            MiniProcess(
                stack,
                tmp_path,
                role,
                checkpoints["llama"],
                PD_TRANSFER_VIA_STORAGE="1",
                PDSTORE_STORE=f"file://{disk.at}/pool?budget=1GiB",
                PDSTORE_STAGING="8MiB",
            )
            for role, disk in (("prefill", p_disk), ("decode", d_disk))
        ]
        for engine in engines:
            engine.wait_ready()

        def route(mode):
            port = free_port()
            words = [sys.executable, "-m", "pdstore.router", "--port", str(port), "--mode", mode]
            p, d = (f"http://127.0.0.1:{engine.port}" for engine in engines)
            stack.enter_context(child([*words, "--prefill", p, "--decode", d], cwd=ROOT))
            client = stack.enter_context(
                httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)
            )

            def is_ready():
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/health").status_code == 200

            until(is_ready)
            return client

        yield route, engines[1]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["relay", "concurrent"])
def test_d_loads_at_once_what_its_host_had_looked_for_in_vain(hosts, mode):
    """The quick case of the kind: tests/store/file/test_hosts.py."""
    route, d = hosts
    client = route(mode)
    for n in range(4):
        prompt, began = prompt_of(300, seed=n), time.monotonic()
        body = {"prompt": prompt, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert time.monotonic() - began < SOON_S
    assert "fell short" not in d.log, d.log
    loaded = re.findall(r'^pdstore_tokens_total\{.*"loaded".*\} (\S+)', d.metrics, re.MULTILINE)
    assert sum(map(float, loaded)) >= 4 * 299
