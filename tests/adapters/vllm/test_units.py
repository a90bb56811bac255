"""vLLM as P and as D, and the router, started by the lines of the units in deploy/systemd."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from examples.ports import free_ports
from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT, TINY
from tests.adapters.vllm.asking import ANSWER_S, new_prompt
from tests.adapters.vllm.servers import START_S
from tests.deploy.units import ROUTER, Unit, install, set_variables, starting, wheel_of

pytestmark = pytest.mark.nightly

_VLLM = f"""\
#!/bin/sh
exec {Path(sys.executable).with_name("vllm")} "$@"
"""


@pytest.mark.timeout(3 * START_S)
def test_the_units_start_vllm_and_d_loads_what_p_has_saved(checkpoints, tmp_path):
    root = tmp_path / "root"
    programs = {"vllm": _VLLM, "pdstore-router": ROUTER}
    done = install(root, "--no-index", wheel_of(tmp_path, programs))
    assert done.returncode == 0, done.stdout + done.stderr
    etc = root / "etc/pdstore"
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    set_variables(etc / "pool.env", PDSTORE_STORE=f"file://{tmp_path}/pool")
    options = " ".join(each for each in TINY if "shutdown" not in each)
    for role, port in zip(("prefill", "decode"), ports[:2], strict=True):
        own = {"MODEL": str(checkpoints("llama")), "PORT": str(port), "VLLM_OPTIONS": options}
        set_variables(etc / f"{role}.env", **own, CUDA_VISIBLE_DEVICES="", PDSTORE_STATUS_PORT="0")
        with (etc / f"{role}.env").open("a") as file:
            for name, value in {**ENVIRONMENT, **CPU_ENVIRONMENT}.items():
                file.write(f"{name}={value}\n")
    front = f"--port {ports[2]} --prefill {urls[0]} --decode {urls[1]} --mode concurrent"
    set_variables(etc / "router.env", ROUTER_OPTIONS=front)
    names = ("pdstore-vllm@prefill", "pdstore-vllm@decode", "pdstore-router")
    units = {Unit(name, root): url for name, url in zip(names, urls, strict=True)}
    with starting(units, tmp_path, START_S):
        body = {"model": "pdstore", "prompt": new_prompt(300), "max_tokens": 4}
        answer = httpx.post(f"{urls[2]}/v1/completions", json=body, timeout=ANSWER_S)
        assert answer.status_code == 200, answer.text
        lines = httpx.get(f"{urls[1]}/metrics").text.splitlines()
    loaded = [line for line in lines if "pdstore_tokens_total{" in line and '"loaded"' in line]
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert sum(float(line.split()[-1]) for line in loaded) == 300, logs
    assert "empty, so as if not set" not in logs
