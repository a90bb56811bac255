"""SGLang as P and D over a pool: how long a client waits between them, and what D computes.

    python -m benchmarks.sglang_gpu --json FILE [--pool DIRECTORY] [--gpus 0 1] [--faults]
                                    [--backends pdstore-shm file ...] [--tokens 8192 32768]
                                    [--only "pages damaged" "store gone" ...]

One server without a pool computes each prompt whole; its answers are what others are compared with.
Each backend has a P beside that server on the first GPU and a D on the last. All servers start at
once; those of one backend at a time are asked, as a router does: D at once when P has answered, and
again for another prompt when P has had time to store it. `file` and `mooncake` are SGLang's own
backends. The file of results is written after each step; what fails is in it, and the next step
goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

from benchmarks.sglang_backends import BACKENDS, Place
from benchmarks.sglang_faults import FAULTS, Scene, suits
from benchmarks.sglang_instance import Instance, distance, stop_all
from benchmarks.stored_bytes import touch
from benchmarks.vllm_session import LLAMA_8B, Session, medians

Row = dict[str, Any]
Pair = tuple[Instance, Instance]

_FAULT_S = 15  # what the quickest fault takes
_CHECKED = 16  # tokens of a compared answer
_PAGE = 64
_BACKENDS = ["pdstore-shm", "pdstore-file", "file", "mooncake"]


class Servers(Session):
    """A session with SGLang's servers."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.model = given.pool / "pdstore-sglang-model"  # the next run finds it
        self.place = Place(self.pool, given.budget, self.logs)

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
    def servers(self) -> Iterator[tuple[Instance, dict[str, Pair]]]:
        """The server without a pool, and the P and D of each backend whose servers start."""
        with contextlib.ExitStack() as running:
            plain = self.instance("plain", self.given.gpus[0])
            started: list[Instance] = [plain]
            running.callback(stop_all, started)
            pairs: dict[str, Pair] = {}
            for backend in self.given.backends:
                with self.step(f"start {backend}"):
                    pairs[backend] = self._pair(backend, running)
                    started += pairs[backend]
            self.write("start plain", plain.wait_ready(self.given.start_seconds))
            yield plain, {backend: pair for backend, pair in pairs.items() if self._are_ready(pair)}

    def _pair(self, backend: str, running: contextlib.ExitStack) -> Pair:
        """Starts P and D over an empty pool of a backend."""
        options, environment = BACKENDS[backend](self.place, running)
        p, d = (
            self.instance(f"{backend}-{role}", gpu, *options, **environment, PDSTORE_ROLE=role)
            for role, gpu in (("prefill", self.given.gpus[0]), ("decode", self.given.gpus[-1]))
        )
        return p, d

    def _are_ready(self, pair: Pair) -> bool:
        """Waits for both. Ends both if one does not start."""
        ready: list[Instance] = []
        for each in pair:
            with self.step(f"start {each.name}"):
                self.write(f"start {each.name}", each.wait_ready(self.given.start_seconds))
                ready.append(each)
        if len(ready) < len(pair):
            stop_all(pair)
        return len(ready) == len(pair)


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


def measure(session: Servers, name: str, backend: str, pair: Pair, n: int) -> None:
    """Hands over `--runs` prompts of `n` tokens: `at once`, or `settled` when P has stored them."""
    settle_s = {"at once": 0.0, "settled": session.given.settle}[name]
    rows: list[Row] = []
    for run in range(session.given.runs):
        prompt = session.prompt_of(n, f"{backend} {name} {n} {run}")
        rows.append(hand_over(pair, prompt, settle_s))
        session.write(f"{backend} {n} {name} run {run}", rows[-1])
        for each in pair:
            each.forget()
    session.write(f"{backend} {n} {name} median of {len(rows)}", medians(rows))


def check(session: Servers, backend: str, plain: Instance, pair: Pair, n: int) -> None:
    """Compares an answer of D with those of one server that computes it whole, and its last page.

    D asks when P has stored the prompt, so that it loads it from every backend. Controls: D again
    and P, which then have the pages on their GPUs; and a prompt that ends alike behind other pages.
    """
    prompt = session.prompt_of(n, f"{backend} check {n}")
    pair[0].ask(prompt, 1)
    time.sleep(session.given.settle)
    given, held = (pair[1].ask(prompt, _CHECKED, logprobs=True) for _ in range(2))
    whole = plain.ask(prompt, _CHECKED, logprobs=True)
    own, again = (plain.ask(prompt, _CHECKED, logprobs=True) for _ in range(2))
    saved = pair[0].ask(prompt, _CHECKED, logprobs=True)
    other = session.prompt_of(n, "another")[:-_PAGE] + prompt[-_PAGE:]
    foreign = plain.ask(other, _CHECKED, logprobs=True)
    found = {
        "computed_whole_s": whole.first_at - whole.asked_at - whole.step_s,
        "d_computed": n - given.num_cached,
        "own_cache_computed": n - own.num_cached,
        "d_equals_own_cache": given.ids == own.ids,
        "d_equals_whole": given.ids == whole.ids,
        "whole_equals_own_cache": whole.ids == own.ids,
        "control_other_pages": foreign.ids == whole.ids,
        "own_cache_to_whole": distance(own, whole),
        "own_cache_to_itself": distance(again, own),
        "d_to_own_cache": distance(given, own),
        "d_to_whole": distance(given, whole),
        "d_to_d_again": distance(given, held),
        "d_to_p": distance(given, saved),
        "other_pages_to_whole": distance(foreign, whole),
    }
    session.write(f"{backend} check {n}", found)
    for each in (plain, *pair):
        each.forget()


def warm_up(session: Servers, plain: Instance, pairs: Mapping[str, Pair]) -> None:
    """Lets each server compile its kernels."""
    for n in (1000, session.given.tokens[0]):
        plain.ask(session.prompt_of(n, "plain"), 4)
        for backend, pair in pairs.items():
            with session.step(f"{backend} warm-up"):
                prompt = session.prompt_of(n, f"{backend} {n}")
                session.write(f"{backend} warm-up", hand_over(pair, prompt, 1.0))
    for each in (plain, *chain(*pairs.values())):
        each.forget()


def compare(session: Servers, plain: Instance, pairs: Mapping[str, Pair]) -> None:
    """Measures each number of tokens with each backend; what matters most comes first."""
    for n in session.given.tokens:
        for part in ("check", "at once", "settled"):
            for backend, pair in pairs.items():
                if session.seconds_left() > 20:
                    with session.step(f"{backend} {n} {part}"):
                        if part == "check":
                            check(session, backend, plain, pair, n)
                        else:
                            measure(session, part, backend, pair, n)


def break_things(session: Servers, plain: Instance, pairs: Mapping[str, Pair]) -> None:
    """Tries each fault with all of pdstore's backends, each time with a prompt of its own."""
    ours = [backend for backend in pairs if backend.startswith("pdstore")]
    for name, backend in product(session.given.only or FAULTS, ours):
        store = session.place.store if backend == "pdstore-redis" else None
        prompt = session.prompt_of(session.given.tokens[0], f"{backend} {name}")
        directory, settle_s = session.pool / backend, session.given.settle
        scene = Scene(directory, store, plain, *pairs[backend], prompt, settle_s)
        if suits(name, scene) and session.seconds_left() > _FAULT_S:
            with session.step(f"{backend} {name}"):
                session.write(f"{backend} {name}", FAULTS[name](scene))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, required=True, help="the file of results")
    add("--pool", type=Path, default=Path("/dev/shm"), help="a memory-backed directory")
    add("--gpus", nargs="+", default=["0"], help="as CUDA_VISIBLE_DEVICES names them")
    add("--tokens", type=int, nargs="+", default=[8192, 32768])
    add("--backends", nargs="+", choices=BACKENDS, default=_BACKENDS)
    add("--faults", action="store_true", help="also with damaged pools, and servers that restart")
    add("--only", nargs="+", choices=FAULTS, help="these faults in this order, and no times")
    add("--touch", action="store_true", help="write to the arena's memory once, before all else")
    add("--settle", type=float, default=3.0, help="seconds in which P has stored a prompt")
    add("--runs", type=int, default=3)
    add("--seconds", type=float, default=500, help="for all of it")
    add("--start-seconds", type=float, default=180, help="for the servers, from when they start")
    add("--budget", default="20GiB", help="of the pool")
    add("--config", type=json.loads, default=LLAMA_8B, help="the model's shape")
    add("--server", nargs="*", default=SERVER, help="more options of every server")
    add("--launch", default="-m sglang.launch_server", help="what Python runs as a server")
    add("--port", type=int, default=31000)
    return parser.parse_args()


# No CUDA graphs: they shorten no hand-over, and each server would capture its own. With a share of
# 0.9 a server finds room beside those that start with it; --max-total-tokens is what it takes.
SERVER = [
    *("--skip-tokenizer-init", "--dtype=bfloat16", "--page-size=64", "--max-running-requests=8"),
    *("--max-total-tokens=45056", "--mem-fraction-static=0.9", "--chunked-prefill-size=8192"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--sampling-backend=pytorch", "--grammar-backend=none", "--attention-backend=triton"),
    *("--mm-feature-transport=cpu", "--random-seed=0"),
]


def main() -> None:
    session = Servers(_parse())
    given = session.given
    with session.step("checkpoint"):
        from benchmarks.vllm_checkpoint import write_llama

        write_llama(session.model, given.config)
        session.write("checkpoint", {"seconds_left": session.seconds_left()})
    with session.step("all"), session.servers() as (plain, pairs):
        if given.touch:
            session.write("memory of the arena touched", touch(session.pool))
        warm_up(session, plain, pairs)
        if not given.only:
            compare(session, plain, pairs)
        if given.faults or given.only:
            break_things(session, plain, pairs)
    session.end()


if __name__ == "__main__":
    main()
