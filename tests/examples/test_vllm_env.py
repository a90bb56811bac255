"""The environment of `make setup-vllm`: what it installs, and under which names."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from examples import vllm_env

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
