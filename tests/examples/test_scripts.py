"""The example scripts and the Makefile, as a user types them."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.pools import MOONCAKE_VARIABLES, choose
from examples.ports import free_port
from tests.support.child import child

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ["run_prefill.sh", "run_decode.sh"]
SCRIPTS = [*ENGINES, "run_router.sh", "run_pd_storage.sh"]
OURS = (
    *("PYTHON", "VIRTUAL_ENV", "MODEL", "PDSTORE_STORE", "PD_TRANSFER_VIA_STORAGE"),
    *MOONCAKE_VARIABLES,
)

STUB = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] != "-c":
    env = {{k: v for k, v in os.environ.items() if k.startswith("PD")}}
    print(json.dumps({{"arguments": sys.argv[1:], "env": env, "pid": os.getpid()}}))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A `python` that shows how it was called."""
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    return stub


def run(script: str, *arguments: object, **env: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(
        [str(ROOT / "examples" / script), *map(str, arguments)],
        env=clean | {name: str(value) for name, value in env.items()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_says_how_and_starts_nothing(script: str, option: str) -> None:
    done = run(script, option)
    assert done.returncode == 0
    assert f"examples/{script} [--" in done.stdout
    assert "#" not in done.stdout
    assert "set -e" not in done.stdout


WRONG = {
    "--bogus": "unknown option '--bogus'",
    "--port": "--port needs a value",
    "--dry-run": "--dry-run is for --engine sglang",
    "--engine sglang": "--model DIR",
}


@pytest.mark.parametrize("script", SCRIPTS[:3])
@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_option_is_said(script: str, options: str) -> None:
    done = run(script, *options.split())
    assert (done.returncode, done.stdout) == (2, "")
    router_has_none = script == "run_router.sh" and options not in ("--bogus", "--port")
    assert (WRONG["--bogus"][:14] if router_has_none else WRONG[options]) in done.stderr


@pytest.mark.misconfiguration("a port that is taken")
@pytest.mark.parametrize("script", SCRIPTS[:3])
def test_a_busy_port_is_said(script: str, python: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        done = run(script, "--port", port, PYTHON=python)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"port {port} is in use" in done.stderr


@pytest.mark.parametrize("script", ENGINES)
def test_a_missing_model_is_said(script: str, python: Path, tmp_path: Path) -> None:
    done = run(script, "--port", free_port(), PYTHON=python, MODEL=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no checkpoint in '{tmp_path}'" in done.stderr


@pytest.mark.parametrize("script", ENGINES)
def test_vllm_gets_options_for_a_tiny_checkpoint_only_with_the_tiny_one(
    script: str, python: Path, model: Path
) -> None:
    arguments = ["--engine", "vllm", "--port", free_port()]
    own = json.loads(run(script, *arguments, PYTHON=python, MODEL=model).stdout)["arguments"]
    assert own[:2] == ["-m", "examples.vllm_serve"]
    assert "--tiny" not in own
    tiny = json.loads(run(script, *arguments, PYTHON=python).stdout.splitlines()[-1])["arguments"]
    assert "--tiny" in tiny


@pytest.mark.parametrize("script", ENGINES)
def test_an_engine_is_started_with_the_switch_on(script: str, python: Path, model: Path) -> None:
    port = free_port()
    arguments = ["--port", port, "--store", "redis://h:1/0", "--model", model]
    done = run(script, *arguments, "--", "--threads", "2", PYTHON=python)
    seen = json.loads(done.stdout)
    assert seen["env"]["PD_TRANSFER_VIA_STORAGE"] == "1"
    assert seen["env"]["PDSTORE_STORE"] == "redis://h:1/0"
    assert seen["arguments"][:2] == ["-m", "examples.mini_engine"]
    options = seen["arguments"][2:]
    assert options[:6] == ["--role", script[4:-3], "--port", str(port), "--model", str(model)]
    assert options[-2:] == ["--threads", "2"]
    assert "PD_TRANSFER_VIA_STORAGE=1" in done.stderr


@pytest.mark.parametrize("script", ENGINES)
def test_ports_store_and_model_come_from_the_environment_too(
    script: str, python: Path, model: Path
) -> None:
    ports = {name: str(port) for name, port in free_ports().items()}
    seen = json.loads(
        run(script, PYTHON=python, MODEL=model, PDSTORE_STORE="file:///x", **ports).stdout
    )
    assert {ports[f"{script[4:-3].upper()}_PORT"], str(model)} <= set(seen["arguments"])
    assert seen["env"]["PDSTORE_STORE"] == "file:///x"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_becomes_the_process_so_that_ctrl_c_reaches_it(
    script: str, python: Path, model: Path
) -> None:
    ports = {name: str(port) for name, port in free_ports().items()}
    with child(
        [ROOT / "examples" / script],
        env=os.environ | ports | {"PYTHON": str(python), "MODEL": str(model)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        output, _ = process.communicate(timeout=30)
    assert json.loads(output)["pid"] == process.pid


@pytest.mark.parametrize("script", ENGINES)
@pytest.mark.parametrize("name", MOONCAKE_VARIABLES)
def test_mooncakes_variables_name_the_pool_as_they_do_for_the_demo(
    script: str, name: str, python: Path, model: Path
) -> None:
    given = {"PYTHON": python, "MODEL": model, name: "h:2"}
    done = run(script, "--port", free_port(), **given)
    chosen = choose(None, {name: "h:2"})
    assert json.loads(done.stdout)["env"]["PDSTORE_STORE"] == chosen.store == "mooncake://"
    assert f"pool {chosen}" in done.stderr


def test_a_store_that_is_named_wins_over_mooncakes_variables(python: Path, model: Path) -> None:
    given = {"PYTHON": python, "MODEL": model, **dict.fromkeys(MOONCAKE_VARIABLES, "h:2")}
    done = run("run_decode.sh", "--port", free_port(), "--store", "file:///x", **given)
    assert json.loads(done.stdout)["env"]["PDSTORE_STORE"] == "file:///x"
    assert "mooncake" not in done.stderr


def test_a_store_that_is_named_wins_over_the_environment(python: Path, model: Path) -> None:
    given = {"PYTHON": python, "MODEL": model, "PDSTORE_STORE": "file:///y"}
    for options, store in (((), "file:///y"), (("--store", "file:///x"), "file:///x")):
        done = run("run_decode.sh", "--port", free_port(), *options, **given)
        assert json.loads(done.stdout)["env"]["PDSTORE_STORE"] == store


def test_the_router_finds_p_and_d_and_says_how_to_ask(python: Path) -> None:
    port = free_port()
    done = run("run_router.sh", PYTHON=python, ROUTER_PORT=port, PREFILL_PORT=11, DECODE_PORT=12)
    options = json.loads(done.stdout)["arguments"][2:]
    assert options[:4] == ["--port", str(port), "--mode", "relay"]
    assert options[4:] == ["--prefill", "http://127.0.0.1:11", "--decode", "http://127.0.0.1:12"]
    assert f"curl http://127.0.0.1:{port}/v1/completions" in done.stderr


def test_the_router_takes_many_instances(python: Path) -> None:
    given = ["--mode", "concurrent", "--prefill", "http://a", "--prefill", "http://b"]
    done = run("run_router.sh", "--port", free_port(), *given, PYTHON=python)
    options = json.loads(done.stdout)["arguments"]
    assert options[options.index("--mode") + 1] == "concurrent"
    assert [options[i + 1] for i, o in enumerate(options) if o == "--prefill"] == [
        "http://a",
        "http://b",
    ]


def test_the_demo_passes_its_options_on(python: Path, model: Path) -> None:
    done = run("run_pd_storage.sh", "--store", "redis", PYTHON=python, MODEL=model)
    asked = json.loads(done.stdout)["arguments"]
    assert asked == ["-m", "examples.demo", "--model", str(model), "--store", "redis"]


def test_make_explains_itself() -> None:
    done = subprocess.run(
        ["make", "-s"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    tested = ("demo", "test", "test-vllm", "nightly", "check", "bench")
    for target in ("setup", "setup-vllm", *tested, "release"):
        assert f"make {target} " in done.stdout


def free_ports() -> dict[str, int]:
    return {name: free_port() for name in ("PREFILL_PORT", "DECODE_PORT", "ROUTER_PORT")}


def test_make_test_vllm_runs_every_file_with_a_test_of_vllm() -> None:
    """Compares the folders that the Makefile names with the marks of the tests."""
    makefile = (ROOT / "Makefile").read_text()
    [named] = re.findall(r"^VLLM_TESTS := ([^#\n]+)", makefile, flags=re.MULTILINE)
    places = [ROOT / place for place in named.split()]
    marked = re.compile(r"^(pytestmark = |@)pytest\.mark\.vllm$", re.MULTILINE)
    files = {path for path in (ROOT / "tests").rglob("*.py") if marked.search(path.read_text())}
    assert files
    assert all(any(path.is_relative_to(place) for place in places) for path in files)
