"""Real vLLM with unequal numbers of ranks, P -> pool -> D: two ranks to one, and one to two.

    python -m benchmarks.vllm_shards --json FILE [--pool DIRECTORY] [--tokens 1000 8192 32768]
                                     [--gpus 0 1] [--parallel pipeline]

Four instances with one checkpoint: of one rank and of two, without a connector and with pdstore
over files. Two ranks share the KV heads (`tensor`: blocks are in two shards) or the layers
(`pipeline`: blocks are in layer ranges). D computes one token of a prompt that a P with the other
number of ranks has saved. Its answer is compared with those of the instance without a connector
that has D's ranks. How far sums in another order move an answer is told by the instance that has
P's, and by its own prefix cache; how far wrong KV would, by a prompt of which 64 tokens are others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.vllm_instance import Answer, Instance
from benchmarks.vllm_session import LLAMA_8B, Kind, Session, add_options, distance, loaded, medians

ROOT = Path(__file__).parent.parent
EIGHT_LAYERS = {**LLAMA_8B, "num_hidden_layers": 8, "vocab_size": 32000}
RANKS_MEET_HERE = {
    "VLLM_HOST_IP": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
HANDS_OVER = {"do_remote_decode": True}


class Direction(NamedTuple):
    """From P to D, and the instances without a connector that have their ranks."""

    name: str
    p: Instance
    d: Instance
    plain_p: Instance
    plain_d: Instance
    ranks_of_d: int

    def forget(self) -> bool:
        """Empties all of vLLM's own prefix caches."""
        return all([each.forget() for each in (self.p, self.d, self.plain_p, self.plain_d)])


def eight(instance: Instance, prompt: list[int], params: Any = None) -> Answer:
    """Asks for eight tokens, with so many logprobs that any two answers have some in common."""
    answer: Answer = instance.ask(prompt, 8, params, 20)
    return answer


def measure(session: Session, to: Direction, n: int, run: int) -> Answer:
    """Takes one prompt everywhere: computed, saved, loaded by D, and reloaded by P."""
    block = to.plain_d.started["block_tokens"]
    n = (n - 1) // block * block + 1  # then vLLM's own cache lacks one token, as D does
    seed = f"{to.name} {n} {run}"  # a prompt that the pool has not seen
    prompt = session.prompt_of(n, seed)
    row: Answer = {"tokens": n, "bytes": n * session.bytes_per_token}
    whole, cached = (eight(to.plain_d, prompt) for _ in range(2))
    other_size, others_cached = (eight(to.plain_p, prompt) for _ in range(2))
    other = list(prompt)
    other[n // 2 : n // 2 + 64] = session.prompt_of(64, f"other than {seed}")
    changed = eight(to.plain_d, other)

    saved = to.p.ask(prompt, 1, HANDS_OVER)
    row |= {"p_s": saved["seconds"], "p_computed": saved["computed"]}
    row["until_stored_s"] = to.p.settle()
    first = to.d.ask(prompt, 1, saved["handoff"])
    row |= loaded("d_load", first, row["bytes"])
    row["d_loaded"] = first["counters"].get("tokens_total:loaded", 0)
    row["d_forgot"] = to.d.forget()
    taken = eight(to.d, prompt, saved["handoff"])
    row["p_forgot"] = to.p.forget()
    again = eight(to.p, prompt)
    return row | {
        "d_cached_says_vllm": first["cached"],
        "d_computed_again": taken["computed"],
        "own_cache_computed": cached["computed"],
        "other_ranks_ids_equal_whole": other_size["ids"] == whole["ids"],
        "d_difference_to_p": distance(first, saved),
        "p_difference_to_its_whole": distance(saved, other_size),
        "control_other_ranks": distance(other_size, whole),
        "control_own_cache": distance(cached, whole),
        "control_64_tokens_changed": distance(changed, whole),
        **_taken(taken, whole, cached),
        **_reloaded(again, others_cached),
        "all_forgot": to.forget(),
    }


def _taken(taken: Answer, whole: Answer, cached: Answer) -> Answer:
    """Compares D's answer with those of a vLLM alone that has D's ranks."""
    return {
        "d_ids_equal_whole": taken["ids"] == whole["ids"],
        "d_ids_equal_own_cache": taken["ids"] == cached["ids"],
        "d_difference_to_whole": distance(taken, whole),
        "d_difference_to_own_cache": distance(taken, cached),
        "ids": taken["ids"],
    }


def _reloaded(again: Answer, cached: Answer) -> Answer:
    """Compares P's own prompt from the pool with one that never left vLLM."""
    return {
        "reload_computed": again["computed"],
        "reload_loaded": again["counters"].get("tokens_total:loaded", 0),
        "reload_ids_equal_own_cache": again["ids"] == cached["ids"],
        "reload_logprobs_equal_own_cache": again["logprobs"] == cached["logprobs"],
        "reload_difference_to_own_cache": distance(again, cached),
    }


def unmet(row: Answer, ranks: int) -> list[str]:
    """Returns the expectations that a row does not meet."""
    expected = {
        "D computes one token": row["d_load_computed"] == row["d_computed_again"] == 1,
        "each rank of D loads its part of all tokens": row["d_loaded"] == ranks * row["tokens"],
        "P computes the whole prompt": row["p_computed"] == row["tokens"],
        "the caches were emptied": row["d_forgot"] and row["p_forgot"] and row["all_forgot"],
    }
    return [what for what, is_met in expected.items() if not is_met]


def is_near(rows: list[Answer]) -> bool:
    """True if D's answers are as near to those without a connector as other sum orders are."""
    controls = [
        row[name] or 0.0 for row in rows for name in ("control_other_ranks", "control_own_cache")
    ]
    errors = [row["d_difference_to_whole"] for row in rows]
    return None not in errors and max(errors) <= 1.5 * max(controls)


def compare(session: Session, to: Direction) -> None:
    """Warms up, then measures each size `--runs` times."""
    sizes = session.given.tokens
    with session.step(f"{to.name} warm-up"):
        for n in (min(sizes), max(sizes)):
            session.write(f"{to.name} warm-up {n}", measure(session, to, n, -1))
    for n in sizes:
        rows: list[Answer] = []
        for run in range(session.given.runs):
            if session.seconds_left() < 15:
                break
            name = f"{to.name} {n} run {run}"
            with session.step(name):
                rows.append(measure(session, to, n, run))
                session.write(name, rows[-1])
                for what in unmet(rows[-1], to.ranks_of_d):
                    session.fail(name, f"not so: {what}")
        if rows:
            name = f"{to.name} {n} median of {len(rows)}"
            session.write(name, medians(rows))
            if not is_near(rows):
                session.fail(name, "not so: D's answers are near to those without a connector")


def kinds_of(session: Session, checkpoint: Path) -> dict[str, Kind]:
    """Returns the instances: one rank on the first GPU, with pdstore on the last; two on both."""
    given = session.given
    shared = {"enforce_eager": True, "disable_custom_all_reduce": True}
    model = session.llm_arguments(shared, model=str(checkpoint), **given.backend)
    parts = {"tensor": {"PDSTORE_KV_SHARDS": "2"}, "pipeline": {"PDSTORE_LAYER_RANGES": "2"}}
    pdstore = session.pdstore_environment(session.files(), "both", **parts[given.parallel])
    both = {"CUDA_VISIBLE_DEVICES": ",".join(given.gpus), **RANKS_MEET_HERE}
    two_ranks = {**model, f"{given.parallel}_parallel_size": 2}
    return {
        "plain1": ({"CUDA_VISIBLE_DEVICES": given.gpus[0]}, dict(model)),
        "plain2": (both, dict(two_ranks)),
        "pdstore1": (pdstore | {"CUDA_VISIBLE_DEVICES": given.gpus[-1]}, dict(model)),
        "pdstore2": (pdstore | both, dict(two_ranks)),
    }


def check_weights(started: dict[str, Any]) -> None:
    """Raises ValueError unless each rank's weights are those of the rank without a connector."""
    for ranks in (1, 2):
        names = (f"pdstore{ranks}", f"plain{ranks}")
        ours, theirs = (started[name].started["weights"] for name in names)
        if ours != theirs:
            raise ValueError(f"{ranks} ranks: weights are {ours}, without a connector {theirs}")


def run(session: Session) -> None:
    given = session.given
    checkpoint = (given.checkpoint or given.pool / "pdstore-bench-checkpoint").resolve()
    made = [sys.executable, "-m", "benchmarks.vllm_checkpoint"]
    subprocess.run([*made, checkpoint, json.dumps(given.config)], cwd=ROOT, check=True)
    session.write("checkpoint", [each.name for each in sorted(checkpoint.iterdir())])
    with session.instances(**kinds_of(session, checkpoint)) as ready:
        with session.step("weights"):
            check_weights(ready)
        for name, each in ready.items():
            with session.step(f"{name} computes"):
                each.ask(session.prompt_of(300, name), 8)
                each.forget()
        one, two = ready["pdstore1"], ready["pdstore2"]
        plain = ready["plain1"], ready["plain2"]
        compare(session, Direction("2 to 1", two, one, plain[1], plain[0], ranks_of_d=1))
        compare(session, Direction("1 to 2", one, two, plain[0], plain[1], ranks_of_d=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(gpus=["0", "1"])
    parser.add_argument("--parallel", choices=("tensor", "pipeline"), default="tensor")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 8192, 32768])
    parser.add_argument("--config", type=json.loads, default=EIGHT_LAYERS)
    parser.add_argument("--checkpoint", type=Path, help="a directory; by default one in the pool")
    parser.add_argument("--kv-bytes", type=int, default=6 << 30, help="on each GPU")
    session = Session(parser.parse_args())
    with session.step("shards"):
        run(session)
    session.end()


if __name__ == "__main__":
    main()
