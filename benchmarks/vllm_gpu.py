"""Real vLLM on a GPU or two, P -> pool -> D: what saving costs P, and how soon D has its prompt.

    python -m benchmarks.vllm_gpu --json FILE [--pool DIRECTORY] [--tokens 32768 8192 65536]
                                  [--gpus 0 1]

Instances of vLLM with one dummy model lie side by side on the GPU and are asked in turn, so that
each ratio is of one run: without a connector, P and D with pdstore over files in a memory-backed
directory, and over Mooncake; and one with vLLM's own MooncakeStoreConnector. Of several GPUs D has
the last, and all others have the first. The file is written after each step; what fails is in it,
with its traceback, and the next step goes on.

Dummy weights are alike wherever vLLM makes them; they are scaled here, or no answer would depend on
the KV. An answer of D, which computes one token, is compared bit by bit with one for which vLLM's
own prefix cache had all but one token, and by value with one that was computed whole.
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

from benchmarks.vllm_instance import Answer, Instance
from benchmarks.vllm_session import LLAMA_8B, Kind, Session, add_options, distance, loaded, medians

ROOT = Path(__file__).parent.parent
MLA = {
    **LLAMA_8B,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 4,
    "n_routed_experts": 2,  # in no layer
    "vocab_size": 32000,
    "rope_theta": 10000.0,
}


def measure(
    session: Session, plain: Instance | None, p: Instance, d: Instance | None, n: int, seed: int
) -> Answer:
    """Takes one prompt everywhere: computed, saved, reloaded by P, loaded by D."""
    prompt = session.prompt_of(n, seed)
    row: Answer = {"tokens": n, "bytes": n * session.bytes_per_token}
    whole = None
    if plain is not None:
        whole = plain.ask(prompt, 1)
        row["prefill_s"] = whole["seconds"]
        row["prefill_computed"] = whole["computed"]
        plain.forget()
    saved = p.ask(prompt, 1)
    row["prefill_saving_s"] = saved["seconds"]
    row["until_stored_s"] = p.settle()
    row["save_counters"] = saved["counters"]
    row["p_forgot"] = p.forget()
    again = p.ask(prompt, 1)
    row |= loaded("reload", again, row["bytes"])
    row["p_forgot_again"] = p.forget()
    answers = [saved, again]
    if d is not None:
        taken = d.ask(prompt, 1, saved["handoff"])
        row |= loaded("d_load", taken, row["bytes"])
        row["d_forgot"] = d.forget()
        answers.append(taken)
    if whole is not None:
        row["same_first_token"] = [each["ids"] == whole["ids"] for each in answers]
        row["logprob_differences"] = [distance(each, whole) for each in answers]
    return row


def check(session: Session, plain: Instance, p: Instance, d: Instance, n: int, seed: int) -> Answer:
    """Compares eight tokens of D with those of vLLM alone, whole and with its own cache."""
    block = plain.started["block_tokens"]
    n = (n - 1) // block * block + 1  # then vLLM's own cache lacks one token, as D does
    prompt = session.prompt_of(n, seed)
    whole = plain.ask(prompt, 8)
    cached = plain.ask(prompt, 8)
    other = list(prompt)
    other[n // 2 : n // 2 + 64] = session.prompt_of(64, seed + 1)
    changed = plain.ask(other, 8)
    saved = p.ask(prompt, 1)
    p.settle()
    taken = d.ask(prompt, 8, saved["handoff"])
    p.forget()
    again = p.ask(prompt, 8)
    found = {
        "tokens": n,
        "own_cache_computed": cached["computed"],
        "d_computed": taken["computed"],
        "d_ids_equal_own_cache": taken["ids"] == cached["ids"],
        "d_logprobs_equal_own_cache": taken["logprobs"] == cached["logprobs"],
        "d_difference_to_own_cache": distance(taken, cached),
        "reload_logprobs_equal_own_cache": again["logprobs"] == cached["logprobs"],
        "d_ids_equal_whole": taken["ids"] == whole["ids"],
        "d_difference_to_whole": distance(taken, whole),
        "own_cache_difference_to_whole": distance(cached, whole),
        "p_difference_to_whole": distance(saved, whole),
        "control_64_tokens_changed": distance(changed, whole),
        "ids": taken["ids"],
        "logprobs": [max(one.values()) for one in taken["logprobs"]],
    }
    for each in (plain, p, d):
        each.forget()
    return found


def compare(
    session: Session,
    name: str,
    three: tuple[Instance | None, Instance, Instance | None],
    sizes: list[int],
) -> None:
    """Warms up, then measures each size `--runs` times. three: without a connector, P, D."""
    with session.step(f"{name} warm-up"):
        for n in (max(sizes[0] // 2, 256), sizes[0]):
            session.write(f"{name} warm-up {n}", measure(session, *three, n, seed=1000 + n))
    for n in sizes:
        rows: list[Answer] = []
        for run in range(session.given.runs):
            if session.seconds_left() < 8:
                break
            with session.step(f"{name} {n} run {run}"):
                rows.append(measure(session, *three, n, seed=n + 7919 * (run + 1)))
                session.write(f"{name} {n} run {run}", rows[-1])
        if rows:
            found = medians(rows)
            if "prefill_s" in found and "prefill_saving_s" in found:
                found["saving_slows_by"] = found["prefill_saving_s"] / found["prefill_s"] - 1
            session.write(f"{name} {n} median of {len(rows)}", found)


def trio(session: Session, prefix: str, store: str, model: dict[str, Any]) -> dict[str, Kind]:
    """Returns an instance without a connector, P, and D, which has the last GPU."""
    first, last = ({"CUDA_VISIBLE_DEVICES": session.given.gpus[i]} for i in (0, -1))
    weights = {"PDSTORE_WEIGHTS": "dummy-1234-scaled"}
    p, d = (session.pdstore_environment(store, role, **weights) for role in ("prefill", "decode"))
    return {
        f"{prefix}plain": (first, dict(model)),
        f"{prefix}p": (p | first, dict(model)),
        f"{prefix}d": (d | last, dict(model)),
    }


def with_files(session: Session) -> None:
    given = session.given
    model = session.dummy_model(given.config, **given.backend)
    with session.instances(**trio(session, "", session.files(), model)) as ready:
        plain, p, d = ready.get("plain"), ready["p"], ready.get("d")
        compare(session, "file", (plain, p, d), given.tokens)
        for n in sorted(given.tokens):
            if plain is not None and d is not None and session.seconds_left() > 15:
                with session.step(f"check {n}"):
                    session.write(f"check {n}", check(session, plain, p, d, n, seed=n))


def with_mooncake(session: Session) -> None:
    """pdstore over a Mooncake pool, and vLLM's MooncakeStoreConnector over one of its own."""
    given = session.given
    sizes = sorted(given.tokens)[:2][::-1]
    store = "mooncake://127.0.0.1:50051?lease=10"
    model = session.dummy_model(given.config, **given.backend)
    with mooncakes(session) as their_config:
        kinds = trio(session, "mooncake_", store, model)
        their_environment = {
            "MOONCAKE_CONFIG_PATH": str(their_config.resolve()),
            "CUDA_VISIBLE_DEVICES": given.gpus[0],
        }
        theirs = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        kinds["theirs"] = (their_environment, {**model, "kv_transfer_config": theirs})
        with session.instances(**kinds) as ready:
            plain = ready.get("mooncake_plain")
            if "mooncake_p" in ready:
                three = plain, ready["mooncake_p"], ready.get("mooncake_d")
                compare(session, "mooncake", three, sizes)
            if "theirs" in ready:
                compare(session, "MooncakeStoreConnector", (plain, ready["theirs"], None), sizes)


@contextlib.contextmanager
def mooncakes(session: Session) -> Iterator[Path]:
    """Runs pdstore's pool and a master for the other connector; yields that one's config file."""
    segment = session.given.segment
    pool = [ROOT / "examples/run_mooncake.sh", "--segment", segment]
    other = [
        *("mooncake_master", "--rpc_port=50061", "--rpc_address=127.0.0.1"),
        *("--metrics_port=9013", "--rpc_thread_num=4", "--default_kv_lease_ttl=10000"),
    ]
    their_config = session.logs / "mooncake.json"
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "127.0.0.1:50061",
        "protocol": "tcp",
        "mode": "embedded",
        "global_segment_size": segment,
        "local_buffer_size": "256MB",
    }
    their_config.write_text(json.dumps(config))
    with contextlib.ExitStack() as running, (session.logs / "their_master.log").open("w") as log:
        running.callback(subprocess.Popen(pool, cwd=ROOT).terminate)
        both = {"stdout": log, "stderr": subprocess.STDOUT}
        running.callback(subprocess.Popen(other, **both).terminate)
        time.sleep(2)
        yield their_config


def with_mla(session: Session) -> None:
    model = session.dummy_model(MLA, max_model_len=9000, kv_cache_memory_bytes=2 << 30)
    with session.instances(**trio(session, "mla_", session.files(), model)) as ready:
        for n in (2048, 8192):
            with session.step(f"MLA check {n}"):
                three = ready["mla_plain"], ready["mla_p"], ready["mla_d"]
                session.write(f"MLA check {n}", check(session, *three, n, seed=n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    kinds = {"files": with_files, "mooncake": with_mooncake, "mla": with_mla}
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192, 65536])
    parser.add_argument("--steps", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--config", type=json.loads, default=LLAMA_8B)
    parser.add_argument("--kv-bytes", type=int, default=12 << 30)
    parser.add_argument("--segment", default="24GB")
    session = Session(parser.parse_args())
    session.vocabulary = min(session.vocabulary, MLA["vocab_size"])
    for name in session.given.steps:
        if session.seconds_left() > 30:
            with session.step(name):
                kinds[name](session)
    session.end()


if __name__ == "__main__":
    main()
