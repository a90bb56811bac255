"""The programs that become vLLM's or SGLang's server."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path

import pytest

from examples import sglang_serve, vllm_env, vllm_serve


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch):
    """Runs main as on a machine with some vLLM; the command and the environment it became."""

    def run(*arguments: str, installed: str = "0.32.0+cpu") -> tuple[list[str], dict[str, str]]:
        seen: list[tuple[list[str], dict[str, str]]] = []
        monkeypatch.setattr(vllm_serve, "version", lambda name: installed)
        monkeypatch.setattr(os, "execve", lambda path, *rest: seen.append(rest))
        vllm_serve.main(["--model", "/m", *arguments])
        ((command, environment),) = seen
        return command, environment

    return run


def test_it_becomes_vllm_serve_of_this_python(become) -> None:
    command, environment = become("--role", "decode", "--port", "7", "--seed", "3")
    assert command[:2] == [sys.executable, "-m"]
    assert command[3:] == ["serve", "/m", "--host", "127.0.0.1", "--port", "7", "--seed", "3"]
    assert environment["PDSTORE_ROLE"] == "decode"


def test_the_cpu_s_environment_is_for_the_cpu_only_and_the_user_s_wins(
    become, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in vllm_serve.CPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _, on_cpu = become()
    assert on_cpu["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert on_cpu["OMP_NUM_THREADS"] == "5"
    _, on_gpu = become(installed="0.32.0")
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu


def test_a_missing_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(vllm_serve, "version", missing)
    with pytest.raises(SystemExit, match="make setup-vllm"):
        vllm_serve.main(["--model", "/m"])


NEEDED = [
    'torch==2.13.0+cpu; platform_machine == "x86_64"',
    'torchaudio; platform_machine != "s390x"',
    "torchvision",
    'torchcodec>=0.14; platform_machine != "riscv64"',
    "transformers<6,>=5",
    "torchmetrics>=1",
    'ray>=2; extra == "ray"',
]


def test_it_installs_what_vllm_needs_less_what_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_env, "requires", lambda name: NEEDED)
    assert vllm_env.requirements() == [
        'torch==2.13.0; platform_machine == "x86_64"',
        "transformers<6,>=5",
        "torchmetrics>=1",
    ]


def test_vllm_is_found_under_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_env.sysconfig, "get_path", lambda name: str(tmp_path))
    for _ in range(2):  # again changes nothing
        vllm_env.name_it_vllm()
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", f"{vllm_env.VERSION}+cpu")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """Runs main with --dry-run; the words of what it prints."""

    def run(*arguments: str) -> list[str]:
        sglang_serve.main(["--model", "/m", "--dry-run", *arguments])
        return shlex.split(capsys.readouterr().out)

    return run


def test_it_becomes_the_server_that_a_dry_run_prints(printed, monkeypatch) -> None:
    asked = ["--role", "decode", "--port", "7", "--tp", "2"]
    seen: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setattr(sglang_serve, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execve", lambda path, *rest: seen.append(rest))
    sglang_serve.main(["--model", "/m", *asked])
    ((command, environment),) = seen
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert environment["PDSTORE_ROLE"] == "decode"
    assert printed(*asked)[-len(command) :] == command


def test_a_dry_run_shows_the_pool_and_no_secret(printed, monkeypatch) -> None:
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setenv("PDSTORE_STORE", "redis://h:1/0")
    monkeypatch.setenv("PDSTORE_SALT", "a secret")
    assert printed("--role", "prefill")[:4] == [
        "PD_TRANSFER_VIA_STORAGE=1",
        "PDSTORE_ROLE=prefill",
        "PDSTORE_STORE=redis://h:1/0",
        sys.executable,
    ]
