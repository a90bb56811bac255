"""Measures what `--first-token prefill` makes of the time to the first token, side by side.

    python -m benchmarks.first_token --json benchmarks/results/first_token.json

P, D and two routers are processes of this machine, the engine is the mini engine. New prompts go in
turn through the router that passes P's token on and through the one that waits for D; a client
streams. A row has the medians of P's prefill, until its answer is in the router, of the time to the
client's first byte, and of what this client waits beyond that very prefill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.checkpoint import Shape, make_model
from benchmarks.command import parser_of, run
from benchmarks.report import Report
from examples.demo.client import is_healthy
from examples.demo.processes import Processes
from examples.ports import free_ports

COLUMNS = ["asked", "tokens", "prefill, ms", "P's token, ms", "beyond, ms", "D's token, ms"]
LETTERS = [chr(code) for code in range(33, 127)]
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
START_S, ANSWER_S, RECORD_S, REST_S = 120.0, 60.0, 10.0, 0.2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Urls(NamedTuple):
    """The URLs of the routers that begin with P's token and D's, and of the first one's status."""

    by_p: str
    by_d: str
    status: str


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()

    def measure() -> Report:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdstore-bench-") as directory:
            scratch = Path(directory)
            shape = Shape(len(LETTERS), given.layers, given.hidden, max(given.tokens) + 64)
            make_model(shape, scratch / "model", "cpu", "float32")
            letters().save_pretrained(scratch / "model")
            with started(scratch) as urls, httpx.Client(timeout=ANSWER_S, trust_env=False) as http:
                return measured(http, urls, given.tokens, given.rounds)

    run(measure, given.json)


def letters() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a letter for each token, so that each can be told at once."""
    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="!"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE)


@contextlib.contextmanager
def started(scratch: Path) -> Iterator[Urls]:
    """Starts P, D and both routers."""
    *ports, status = free_ports(5)
    p, d, by_p, by_d = [f"http://127.0.0.1:{port}" for port in ports]
    with Processes() as processes:
        environment = {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": f"file://{scratch}/pool"}
        for role, url in (("prefill", p), ("decode", d)):
            engine = ["examples.mini_engine", "--role", role, "--model", str(scratch / "model")]
            engine += ["--num-blocks", "1024"]
            start(processes, role, engine, url, **environment)
        for kind, url in (("prefill", by_p), ("decode", by_d)):
            router = ["pdstore.router", "--prefill", p, "--decode", d]
            router += ["--first-token", kind]
            if kind == "prefill":
                router += ["--status", str(status)]
            start(processes, f"router-{kind}", router, url)
        processes.wait_ready(START_S, lambda text: None)
        yield Urls(by_p, by_d, f"http://127.0.0.1:{status}/pdstore")


def start(processes: Processes, name: str, module: list[str], url: str, **more: str) -> None:
    """Starts a server that listens at a URL. more: its environment's additions."""
    command = [sys.executable, "-m", *module, "--port", url.rpartition(":")[2]]
    processes.start(f"bench-{name}", command, partial(is_healthy, url), {**os.environ, **more})


def measured(http: httpx.Client, urls: Urls, tokens: list[int], rounds: int) -> Report:
    report = Report(f"mini engine on the CPU: to the first token, medians of {rounds}", COLUMNS)
    for name in PATHS:
        for count in tokens:
            took = [one_round(http, urls, name, count) for _ in range(rounds + 1)][1:]
            prefill, by_p, by_d = (1e3 * median(times) for times in zip(*took, strict=True))
            beyond = 1e3 * median(by_p - prefill for prefill, by_p, _ in took)
            report.add(name, count, prefill, by_p, beyond, by_d)
    return report


def one_round(http: httpx.Client, urls: Urls, name: str, count: int) -> tuple[float, float, float]:
    """Returns the seconds of P's prefill and to the first byte, with P's token; then with D's."""
    request_id = uuid.uuid4().hex
    by_p = to_first_byte(http, urls.by_p + PATHS[name], body_of(name, count), request_id)
    prefill = prefill_of(http, urls.status, request_id)
    time.sleep(REST_S)  # until P has saved it
    by_d = to_first_byte(http, urls.by_d + PATHS[name], body_of(name, count), uuid.uuid4().hex)
    time.sleep(REST_S)
    return prefill, by_p, by_d


def body_of(name: str, num_tokens: int) -> dict[str, Any]:
    """Returns a request for a prompt that nobody has seen."""
    ids = [random.randrange(len(LETTERS)) for _ in range(num_tokens)]
    body: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "stream": True}
    if name == "completion":
        return body | {"prompt": ids}
    text = " ".join(LETTERS[number] for number in ids)
    return body | {"messages": [{"role": "user", "content": text}]}


def to_first_byte(http: httpx.Client, url: str, body: dict[str, Any], request_id: str) -> float:
    """Returns the seconds from the request to the first bytes of its answer."""
    content, headers = json.dumps(body), {"x-request-id": request_id}
    began = time.perf_counter()
    with http.stream("POST", url, content=content, headers=headers) as response:
        chunks = response.iter_raw()
        first = next(chunks)
        took = time.perf_counter() - began
        if response.status_code != 200:
            sys.exit(f"{url}: {first!r}")
        for _ in chunks:
            pass
    return took


def prefill_of(http: httpx.Client, status: str, request_id: str) -> float:
    """Returns the seconds of P's prefill, as the router has measured it."""
    deadline = time.monotonic() + RECORD_S
    while time.monotonic() < deadline:
        for request in http.get(status).json()["requests"]:
            if request["request_id"] == request_id:
                phases = {phase["name"]: phase for phase in request["phases"]}
                return float(phases["prefill"]["end_s"] - phases["prefill"]["begin_s"])
        time.sleep(0.02)
    sys.exit(f"the router has no record of {request_id}")


if __name__ == "__main__":
    main()
