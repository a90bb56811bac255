"""deploy/systemd: install.sh makes what the units name; their lines start a pair that hands over.

In the place of vLLM runs the mini engine; tests/adapters/vllm/test_units.py starts vLLM itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest

from examples.make_checkpoint import make_checkpoint
from examples.ports import free_ports
from tests.deploy.commands import DEPLOY, ROOT, UNITS
from tests.deploy.units import ROUTER, Unit, install, set_variables, starting, tree_of, wheel_of
from tests.support.mini_engine_kit import DEADLINE_S

EXAMPLES = sorted((DEPLOY / "systemd" / "examples").glob("*.env"))
_ENGINE = f"""\
#!{sys.executable}
import os, sys
_, serve, model, *options = sys.argv
assert serve == "serve"
at = options.index("--shutdown-timeout")
del options[at : at + 2]
os.chdir({str(ROOT)!r})
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["vllm", "--model", model, *options]
from examples.mini_engine.__main__ import main
main()
"""
STAND_INS = {"vllm": _ENGINE, "pdstore-router": ROUTER}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that stands for `/` after install.sh."""
    root = tmp_path_factory.mktemp("root")
    wheel = wheel_of(tmp_path_factory.mktemp("wheel"), STAND_INS)
    done = install(root, "--no-index", wheel, umask=0o077)  # root's on a hardened host
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One that is hardly trained."""
    return make_checkpoint(tmp_path_factory.mktemp("trained") / "tiny", steps=1)


@pytest.mark.slow
def test_it_installs_units_and_examples_and_keeps_what_a_user_has_written(installed, tmp_path):
    found = tree_of(installed)
    assert found == {
        **{f"etc/systemd/system/{path.name}": 0o644 for path in UNITS},
        **{f"etc/pdstore/{path.name}": 0o600 for path in EXAMPLES},
    }
    own = installed / "etc/pdstore/mooncake.env"
    set_variables(own, HOST="10.9.9.9")
    assert install(installed, "--no-index", wheel_of(tmp_path, STAND_INS)).returncode == 0
    assert "HOST=10.9.9.9" in own.read_text()


@pytest.mark.slow
def test_the_units_users_may_run_what_it_installs(installed):
    """vLLM and the router run as users that are not root."""
    for path in [*installed.joinpath("opt").rglob("*"), installed / "opt"]:
        mode = path.stat().st_mode
        assert mode & 0o5 == mode >> 6 & 0o5, f"{path} has {mode:o}"


def test_without_arguments_it_says_what_to_give():
    done = install(Path("/nonexistent"))
    assert done.returncode == 2
    assert "usage: " in done.stderr


def test_every_variable_of_a_unit_is_in_an_example():
    """An unset one would make a start complain, and an empty setting does."""
    for path in UNITS:
        text = path.read_text()
        used = set(re.findall(r"\$\{?(\w+)", text.partition("ExecStart=")[2]))
        own = set(re.findall(r"(\w+)=", "".join(re.findall(r"^Environment=.*", text, re.M))))
        names = re.findall(r"^EnvironmentFile=/etc/pdstore/(.*)", text, re.M)
        expanded = [n.replace("%i", role) for n in names for role in ("prefill", "decode")]
        lines = [
            line
            for name in set(expanded)
            for line in (DEPLOY / "systemd" / "examples" / name).read_text().splitlines()
        ]
        given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        assert used <= given.keys() | own | {"MAINPID"}
        assert all(given.values()), f"{path.name}: an empty variable"


@pytest.mark.slow
def test_the_units_lines_start_p_d_and_the_router(installed, checkpoint, tmp_path):
    p_port, d_port, router_port = free_ports(3)
    etc = installed / "etc/pdstore"
    set_variables(etc / "pool.env", PDSTORE_STORE=f"file://{tmp_path}/pool")
    for role, port in (("prefill", p_port), ("decode", d_port)):
        own = {"MODEL": str(checkpoint), "PORT": str(port), "PDSTORE_STATUS_PORT": "0"}
        set_variables(etc / f"{role}.env", **own, VLLM_OPTIONS="--block-size 32 --num-blocks 64")
    urls = [f"http://127.0.0.1:{port}" for port in (p_port, d_port, router_port)]
    # systemd takes port 8000 of the unit's line; the later option wins
    options = f"--port {router_port} --prefill {urls[0]} --decode {urls[1]} --mode concurrent"
    set_variables(etc / "router.env", ROUTER_OPTIONS=options)
    names = ("pdstore-vllm@prefill", "pdstore-vllm@decode", "pdstore-router")
    units = {Unit(name, installed): url for name, url in zip(names, urls, strict=True)}
    with starting(units, tmp_path, DEADLINE_S):
        body = {"model": "pdstore", "prompt": "the quick brown fox " * 20, "max_tokens": 4}
        answer = httpx.post(f"{urls[2]}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        metrics = httpx.get(f"{urls[1]}/metrics").text
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    loaded = re.search(r'^pdstore_tokens_total\{verb="loaded"\} (\S+)', metrics, re.M)
    assert loaded is not None
    assert float(loaded[1]) > 0, logs
    assert "empty, so as if not set" not in logs
    assert "status on http://127.0.0.1:" in logs
