"""vllm-router, the one of the vLLM project, in front of P and D."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.ports import free_port
from tests.adapters.vllm.asking import Since, alone, ask, new_prompt
from tests.adapters.vllm.servers import Server
from tests.support.child import child

PROGRAM = Path(sys.executable).with_name("vllm-router")

pytestmark = pytest.mark.nightly


@contextmanager
def router(pair, log):
    port, metrics = free_port(), free_port()
    command = [PROGRAM, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
    command += ["--prefill", pair.p.url, "--decode", pair.d.url, "--policy", "round_robin"]
    command += ["--prometheus-port", str(metrics)]
    with log.open("wb") as out, child(command, stdout=out, stderr=subprocess.STDOUT) as process:
        yield Server("router", f"http://127.0.0.1:{port}", process.pid, log).wait_ready()


@pytest.mark.parametrize("num_tokens", [10, 64, 300, 900])
def test_d_loads_what_p_has_saved_behind_vllm_router(pair, tmp_path, num_tokens):
    prompt = new_prompt(num_tokens)
    expected = alone(pair.d, prompt)
    with router(pair, tmp_path / "log") as server:
        since = Since(pair.d)
        ask(server, prompt).assert_same(expected)
        assert since.loaded == num_tokens
        assert since.computed <= 1
