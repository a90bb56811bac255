"""The process that becomes `vllm serve`: its environment, its options."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from examples import vllm_serve


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
