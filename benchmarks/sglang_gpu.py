"""SGLang as P and D over a pool: how long a client waits between them, and what D computes.

    python -m benchmarks.sglang_gpu --json FILE [--pool DIRECTORY] [--gpus 0 1] [--faults]
                                    [--backends pdstore-shm file mooncake] [--tokens 8192 32768]

One server without a pool computes each prompt whole; its answers are what others are compared with.
For each backend a P and a D are started (P beside that server on the first GPU, D on the last) and
asked in turn, as a router does: D at once when P has answered, and again for another prompt when P
has had time to store it. `file` and `mooncake` are SGLang's own backends. The file of results is
written after each step; what fails is in it, and the next step goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sglang_backends import BACKENDS
from benchmarks.sglang_faults import Scene, faults_of
from benchmarks.sglang_instance import Answer, Instance
from benchmarks.vllm_session import LLAMA_8B, Session, medians

Row = dict[str, Any]
Pair = tuple[Instance, Instance]

_CHECKED = 16  # tokens of a compared answer


class Servers(Session):
    """A session with SGLang's servers.

    store: the process of a store that is a server; None without one.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.store: subprocess.Popen[bytes] | None = None
        self.model = given.pool / "pdstore-sglang-model"  # the next run finds it
        self.budget: str = given.budget

    def instance(self, name: str, gpu: str, *options: str, **environment: str) -> Instance:
        """Starts a server on a GPU, at a port of its own."""
        self.given.port += 1
        common = [f"--model-path={self.model}", "--host=127.0.0.1", *self.given.server]
        environment = {"CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", **environment}
        launch, port = self.given.launch.split(), self.given.port
        made = Instance(name, port, launch, [*common, *options], environment, self.logs)
        made.start()
        return made

    @contextlib.contextmanager
    def pair(self, backend: str) -> Iterator[Pair]:
        """Starts P and D over an empty pool. Raises RuntimeError if one does not start."""
        with contextlib.ExitStack() as running:
            options, environment = BACKENDS[backend](self, running)
            made = [
                self.instance(f"{backend}-{role}", gpu, *options, **environment, PDSTORE_ROLE=role)
                for role, gpu in (("prefill", self.given.gpus[0]), ("decode", self.given.gpus[-1]))
            ]
            for each in made:
                running.callback(each.stop)
            for each in made:
                self.write(f"start {each.name}", each.wait_ready(self.given.start_seconds))
            yield made[0], made[1]


def hand_over(pair: Pair, prompt: list[int], settle_s: float) -> Row:
    """Asks P and then D for one prompt, as a router does."""
    p, d = pair
    saved = p.ask(prompt, 1)
    time.sleep(settle_s)
    asked = d.ask(prompt, 4)
    return {
        "prefill_s": saved.ended_at - saved.asked_at,
        "d_first_token_s": asked.first_at - asked.asked_at,
        "d_step_s": asked.step_s,
        "exposed_s": asked.first_at - asked.asked_at - asked.step_s,
        "d_computed": len(prompt) - asked.num_cached,
    }


def measure(session: Servers, backend: str, plain: Instance, pair: Pair, n: int) -> None:
    """Hands `--runs` prompts of n tokens over: at once, and when P has settled."""
    for name, settle_s in (("at once", 0.0), ("settled", session.given.settle)):
        rows: list[Row] = []
        for run in range(session.given.runs):
            prompt = session.prompt_of(n, f"{backend} {name} {n} {run}")
            row = hand_over(pair, prompt, settle_s)
            whole = plain.ask(prompt, 4)
            row["computed_whole_s"] = whole.first_at - whole.asked_at - whole.step_s
            rows.append(row)
            session.write(f"{backend} {n} {name} run {run}", row)
            for each in (plain, *pair):
                each.forget()
        session.write(f"{backend} {n} {name} median of {len(rows)}", medians(rows))


def check(session: Servers, backend: str, plain: Instance, pair: Pair, n: int) -> None:
    """Compares an answer of D with that of one server, computed whole and with its own cache."""
    prompt = session.prompt_of(n, f"{backend} check {n}")
    pair[0].ask(prompt, 1)
    given = pair[1].ask(prompt, _CHECKED, logprobs=True)
    whole = plain.ask(prompt, _CHECKED, logprobs=True)
    own = plain.ask(prompt, _CHECKED, logprobs=True)
    other = plain.ask(session.prompt_of(n, "another"), _CHECKED, logprobs=True)
    found = {
        "d_computed": n - given.num_cached,
        "own_cache_computed": n - own.num_cached,
        "d_equals_own_cache": given.ids == own.ids,
        "d_equals_whole": given.ids == whole.ids,
        "difference_to_own_cache": distance(given, own),
        "difference_to_whole": distance(given, whole),
        "own_cache_difference_to_whole": distance(own, whole),
        "control_another_prompt": other.ids == whole.ids,
    }
    session.write(f"{backend} check {n}", found)
    for each in (plain, *pair):
        each.forget()


def distance(one: Answer, other: Answer) -> float | None:
    """Returns the largest difference of a logprob, up to where the answers part."""
    alike = 0
    while alike < min(len(one.ids), len(other.ids)) and one.ids[alike] == other.ids[alike]:
        alike += 1
    pairs = zip(one.logprobs[:alike], other.logprobs[:alike], strict=False)
    return max((abs(a - b) for a, b in pairs), default=None)


def compare(session: Servers, backend: str, plain: Instance) -> None:
    """Measures everything about one backend."""
    with session.pair(backend) as pair:
        with session.step(f"{backend} warm-up"):
            for n in (1000, session.given.tokens[0]):
                session.write(f"{backend} warm-up", hand_over(pair, session.prompt_of(n, n), 1.0))
        for n in session.given.tokens:
            for part in (check, measure):
                if session.seconds_left() > 20:
                    with session.step(f"{backend} {part.__name__} {n}"):
                        part(session, backend, plain, pair, n)
        if session.given.faults and backend.startswith("pdstore"):
            break_things(session, backend, plain, pair)


def break_things(session: Servers, backend: str, plain: Instance, pair: Pair) -> None:
    """Tries each fault in its turn, with a prompt of its own."""
    directory, store = session.pool / backend, session.store
    for name, fault in faults_of(is_server=store is not None).items():
        if session.seconds_left() > 30:
            with session.step(f"{backend} {name}"):
                prompt = session.prompt_of(session.given.tokens[0], f"{backend} {name}")
                scene = Scene(directory, store, plain, *pair, prompt, session.given.settle)
                session.write(f"{backend} {name}", fault(scene))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, required=True, help="the file of results")
    add("--pool", type=Path, default=Path("/dev/shm"), help="a memory-backed directory")
    add("--gpus", nargs="+", default=["0"], help="as CUDA_VISIBLE_DEVICES names them")
    add("--tokens", type=int, nargs="+", default=[8192, 32768])
    add("--backends", nargs="+", choices=BACKENDS, default=["pdstore-shm", "file", "mooncake"])
    add("--faults", action="store_true", help="also with damaged pools, and servers that restart")
    add("--settle", type=float, default=3.0, help="seconds in which P has stored a prompt")
    add("--runs", type=int, default=3)
    add("--seconds", type=float, default=570, help="for all of it")
    add("--start-seconds", type=float, default=150, help="for one server")
    add("--budget", default="48GiB", help="of the pool")
    add("--config", type=json.loads, default=LLAMA_8B, help="the model's shape")
    add("--server", nargs="*", default=SERVER, help="more options of every server")
    add("--launch", default="-m sglang.launch_server", help="what Python runs as a server")
    add("--port", type=int, default=31000)
    return parser.parse_args()


SERVER = [
    *("--skip-tokenizer-init", "--dtype=bfloat16", "--page-size=64", "--max-running-requests=8"),
    *("--max-total-tokens=80000", "--mem-fraction-static=0.35", "--chunked-prefill-size=8192"),
    *("--disable-cuda-graph", "--sampling-backend=pytorch", "--grammar-backend=none"),
    *("--attention-backend=triton", "--random-seed=0"),
]


def main() -> None:
    session = Servers(_parse())
    given = session.given
    with session.step("checkpoint"):
        from benchmarks.vllm_checkpoint import write_llama

        write_llama(session.model, given.config)
    plain = session.instance("plain", given.gpus[0])
    try:
        with session.step("start plain"):
            session.write("start plain", plain.wait_ready(given.start_seconds))
            for backend in given.backends:
                if session.seconds_left() > 60:
                    with session.step(backend):
                        compare(session, backend, plain)
    finally:
        plain.stop()
    session.end()


if __name__ == "__main__":
    main()
