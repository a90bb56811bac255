"""The process that becomes an SGLang server: its environment, its options."""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from examples import sglang_serve


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
