"""Real vLLM on one GPU, P -> pool -> D: what saving costs P, and how soon D has its prompt.

    python benchmarks/vllm_gpu.py --json FILE [--pool DIRECTORY] [--tokens 32768 8192 65536]

Instances of vLLM with one dummy model lie side by side on the GPU and are asked in turn, so that
each ratio is of one run: without a connector, P and D with pdstore over files in a memory-backed
directory, and over Mooncake; and one with vLLM's own MooncakeStoreConnector. The file is written
after each step; what fails is in it, with its traceback, and the next step goes on.

Dummy weights are alike wherever vLLM makes them; they are scaled here, or no answer would depend on
the KV. An answer of D, which computes one token, is compared bit by bit with one for which vLLM's
own prefix cache had all but one token, and by value with one that was computed whole.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.vllm_instance import Answer, Instance

ROOT = Path(__file__).parent.parent
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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


RESULTS: dict[str, Any] = {"steps": [], "failures": []}
LOGS = Path("logs")
BEGAN = time.monotonic()
GIVEN = argparse.Namespace()


def seconds_left() -> float:
    return float(BEGAN + GIVEN.seconds - time.monotonic())


def write(step: str, found: Any) -> None:
    if found is not None:
        RESULTS["steps"].append({"step": step, "at": time.monotonic() - BEGAN, "found": found})
    GIVEN.json.write_text(json.dumps(RESULTS, indent=1))
    print(f"[{time.monotonic() - BEGAN:6.1f}] {step}: {json.dumps(found)[:900]}", flush=True)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """A failure in it is written down, and ends nothing but it."""
    try:
        yield
    except Exception:
        RESULTS["failures"].append({"step": name, "error": traceback.format_exc()})
        traceback.print_exc()
        write(f"{name} FAILED", None)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, GIVEN.vocabulary) for _ in range(num_tokens)]


def measure(plain: Instance | None, p: Instance, d: Instance | None, n: int, seed: int) -> Answer:
    """One prompt everywhere: computed, saved, reloaded by P, loaded by D."""
    prompt = prompt_of(n, seed)
    row: Answer = {"tokens": n, "bytes": n * GIVEN.bytes_per_token}
    whole = None
    if plain is not None:
        whole = plain.ask(prompt, 1)
        row["prefill_s"] = whole["seconds"]
        row["prefill_computed"] = whole["computed"]
    saved = p.ask(prompt, 1)
    row["prefill_saving_s"] = saved["seconds"]
    row["until_stored_s"] = p.settle()
    row["save_counters"] = saved["counters"]
    row["p_forgot"] = p.forget()
    again = p.ask(prompt, 1)
    row |= _loaded("reload", again, row["bytes"])
    row["p_forgot_again"] = p.forget()
    answers = [saved, again]
    if d is not None:
        loaded = d.ask(prompt, 1, saved["handoff"])
        row |= _loaded("d_load", loaded, row["bytes"])
        row["d_forgot"] = d.forget()
        answers.append(loaded)
    if whole is not None:
        row["same_first_token"] = [each["ids"] == whole["ids"] for each in answers]
        row["logprob_differences"] = [_distance(each, whole) for each in answers]
    return row


def _loaded(name: str, answer: Answer, num_bytes: int) -> Answer:
    exposed = answer["counters"].get("exposed_seconds_sum:")
    row = {
        f"{name}_s": answer["seconds"],
        f"{name}_computed": answer["computed"],
        f"{name}_gb_per_s": num_bytes / answer["seconds"] / 1e9,
        f"{name}_counters": answer["counters"],
    }
    if exposed:
        row[f"{name}_arrival_to_loaded_gb_per_s"] = num_bytes / exposed / 1e9
    return row


def check(plain: Instance, p: Instance, d: Instance, n: int, seed: int) -> Answer:
    """Eight tokens of D against the same computed by vLLM alone, whole and with its own cache."""
    n = (n - 1) // 16 * 16 + 1  # the own cache then lacks one token, as D does
    prompt = prompt_of(n, seed)
    whole = plain.ask(prompt, 8)
    cached = plain.ask(prompt, 8)
    other = list(prompt)
    other[n // 2 : n // 2 + 64] = prompt_of(64, seed + 1)
    changed = plain.ask(other, 8)
    saved = p.ask(prompt, 1)
    p.settle()
    loaded = d.ask(prompt, 8, saved["handoff"])
    p.forget()
    again = p.ask(prompt, 8)
    found = {
        "tokens": n,
        "own_cache_computed": cached["computed"],
        "d_computed": loaded["computed"],
        "d_ids_equal_own_cache": loaded["ids"] == cached["ids"],
        "d_logprobs_equal_own_cache": loaded["logprobs"] == cached["logprobs"],
        "d_difference_to_own_cache": _distance(loaded, cached),
        "reload_logprobs_equal_own_cache": again["logprobs"] == cached["logprobs"],
        "d_ids_equal_whole": loaded["ids"] == whole["ids"],
        "d_difference_to_whole": _distance(loaded, whole),
        "own_cache_difference_to_whole": _distance(cached, whole),
        "p_difference_to_whole": _distance(saved, whole),
        "control_64_tokens_changed": _distance(changed, whole),
        "ids": loaded["ids"],
        "logprobs": [max(one.values()) for one in loaded["logprobs"]],
    }
    for each in (plain, p, d):
        each.forget()
    return found


def _distance(one: Answer, other: Answer) -> float | None:
    """The largest difference of a logprob that both name, up to where the answers part."""
    worst = None
    for i, (a, b) in enumerate(zip(one["logprobs"], other["logprobs"], strict=False)):
        both = [abs(a[token] - b[token]) for token in a if token in b]
        worst = max([worst or 0.0, *both]) if both else worst
        if one["ids"][i] != other["ids"][i]:
            break
    return worst


def summary(rows: list[Answer]) -> Answer:
    names = sorted({k for row in rows for k, v in row.items() if isinstance(v, (int, float))})
    found = {k: median(row[k] for row in rows if k in row) for k in names}
    if "prefill_s" in found and "prefill_saving_s" in found:
        found["saving_slows_by"] = found["prefill_saving_s"] / found["prefill_s"] - 1
    return found


def compare(
    name: str, plain: Instance | None, p: Instance, d: Instance | None, sizes: list[int]
) -> None:
    """Warms up, then measures each size `--runs` times."""
    with step(f"{name} warm-up"):
        for n in (max(sizes[0] // 2, 256), sizes[0]):
            write(f"{name} warm-up {n}", measure(plain, p, d, n, seed=1000 + n))
    for n in sizes:
        rows: list[Answer] = []
        for run in range(GIVEN.runs):
            if seconds_left() < 8:
                break
            with step(f"{name} {n} run {run}"):
                rows.append(measure(plain, p, d, n, seed=n + 7919 * (run + 1)))
                write(f"{name} {n} run {run}", rows[-1])
        if rows:
            write(f"{name} {n} median of {len(rows)}", summary(rows))


def pdstore_environment(store: str, role: str) -> dict[str, str]:
    return {
        "PD_TRANSFER_VIA_STORAGE": "1",
        "PDSTORE_STORE": store,
        "PDSTORE_ROLE": role,
        "PDSTORE_WEIGHTS": "dummy-1234-scaled",
        "PDSTORE_NATIVE": GIVEN.native,
        "PDSTORE_REQUIRE_STORE": "1",
        "PDSTORE_WORKERS": str(GIVEN.workers),
        "PDSTORE_STAGING": GIVEN.staging,
    }


def llm_arguments(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The arguments of LLM for a model that is nothing but its configuration."""
    name = hashlib.sha256(json.dumps(config).encode()).hexdigest()[:8]
    directory = LOGS / f"model-{name}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    arguments = {
        "model": str(directory.resolve()),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "seed": 0,
        "dtype": "bfloat16",
        "max_model_len": max(GIVEN.tokens) + 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": GIVEN.kv_bytes,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    }
    return arguments | json.loads(GIVEN.llm) | more


@contextlib.contextmanager
def instances(**kinds: tuple[dict[str, str], dict[str, Any]]) -> Iterator[dict[str, Instance]]:
    """Instances that start at once; those that do not start are left out."""
    started = {
        name: Instance(name, LOGS / f"{name}.log", *kind, seconds_left)
        for name, kind in kinds.items()
    }
    ready: dict[str, Instance] = {}
    try:
        for name, each in started.items():
            with step(f"start {name}"):
                limit = max(10.0, min(GIVEN.start_seconds, seconds_left()))
                write(f"start {name}", each.answer(limit))
                ready[name] = each
        yield ready
    finally:
        for each in started.values():
            each.stop()


def with_files() -> None:
    store = f"file://{GIVEN.pool}/pdstore?budget={GIVEN.budget}"
    model = llm_arguments(GIVEN.config, **GIVEN.backend)
    kinds = {
        "plain": ({}, dict(model)),
        "p": (pdstore_environment(store, "prefill"), dict(model)),
        "d": (pdstore_environment(store, "decode"), dict(model)),
    }
    with instances(**kinds) as ready:
        plain, p, d = ready.get("plain"), ready["p"], ready.get("d")
        compare("file", plain, p, d, GIVEN.tokens)
        for n in sorted(GIVEN.tokens):
            if plain is not None and d is not None and seconds_left() > 15:
                with step(f"check {n}"):
                    write(f"check {n}", check(plain, p, d, n, seed=n))


def with_mooncake() -> None:
    """pdstore over a Mooncake pool, and vLLM's MooncakeStoreConnector over one of its own."""
    sizes = sorted(GIVEN.tokens)[:2][::-1]
    pool = subprocess.Popen(
        [ROOT / "examples/run_mooncake.sh", "--segment", GIVEN.segment], cwd=ROOT
    )
    other = subprocess.Popen(
        [
            *("mooncake_master", "--rpc_port=50061", "--rpc_address=127.0.0.1"),
            *("--metrics_port=9013", "--rpc_thread_num=4", "--default_kv_lease_ttl=10000"),
        ],
        stdout=(LOGS / "their_master.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    their_config = LOGS / "mooncake.json"
    their_config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": "127.0.0.1:50061",
                "protocol": "tcp",
                "mode": "embedded",
                "global_segment_size": GIVEN.segment,
                "local_buffer_size": "256MB",
            }
        )
    )
    store = "mooncake://127.0.0.1:50051?lease=10&discard=10&topology=shared&client=127.0.0.1:50052"
    model = llm_arguments(GIVEN.config, **GIVEN.backend)
    theirs = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    kinds = {
        "mooncake_p": (pdstore_environment(store, "prefill"), dict(model)),
        "mooncake_d": (pdstore_environment(store, "decode"), dict(model)),
        "theirs": (
            {"MOONCAKE_CONFIG_PATH": str(their_config.resolve())},
            {**model, "kv_transfer_config": theirs},
        ),
        "plain": ({}, dict(model)),
    }
    time.sleep(2)
    try:
        with instances(**kinds) as ready:
            plain = ready.get("plain")
            if "mooncake_p" in ready:
                pair = ready["mooncake_p"], ready.get("mooncake_d")
                compare("mooncake", plain, *pair, sizes)
            if "theirs" in ready:
                compare("MooncakeStoreConnector", plain, ready["theirs"], None, sizes)
    finally:
        for each in (pool, other):
            each.terminate()


def with_mla() -> None:
    store = f"file://{GIVEN.pool}/pdstore?budget={GIVEN.budget}"
    model = llm_arguments(MLA, max_model_len=9000, kv_cache_memory_bytes=2 << 30)
    kinds = {
        "mla_plain": ({}, dict(model)),
        "mla_p": (pdstore_environment(store, "prefill"), dict(model)),
        "mla_d": (pdstore_environment(store, "decode"), dict(model)),
    }
    with instances(**kinds) as ready:
        for n in (2048, 8192):
            with step(f"MLA check {n}"):
                three = ready["mla_plain"], ready["mla_p"], ready["mla_d"]
                write(f"MLA check {n}", check(*three, n, seed=n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pool", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192, 65536])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", nargs="+", default=["files", "mooncake", "mla"])
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    parser.add_argument("--start-seconds", type=float, default=150, help="for one instance")
    parser.add_argument("--config", type=json.loads, default=LLAMA_8B)
    parser.add_argument("--llm", default="{}", help="more arguments of LLM, as JSON")
    parser.add_argument("--backend", type=json.loads, default={"attention_backend": "FLASH_ATTN"})
    parser.add_argument("--kv-bytes", type=int, default=12 << 30)
    parser.add_argument("--native", default="require")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--staging", default="2GiB")
    parser.add_argument("--budget", default="56GiB")
    parser.add_argument("--segment", default="24GB")
    parser.parse_args(namespace=GIVEN)
    global LOGS
    LOGS = GIVEN.json.parent / "logs"
    LOGS.mkdir(parents=True, exist_ok=True)
    config = GIVEN.config
    GIVEN.vocabulary = min(config["vocab_size"], MLA["vocab_size"])
    size = {"bfloat16": 2, "float32": 4}[json.loads(GIVEN.llm).get("dtype", "bfloat16")]
    heads = config["num_key_value_heads"] * config["head_dim"]
    GIVEN.bytes_per_token = 2 * size * heads * config["num_hidden_layers"]
    RESULTS["given"] = {k: str(v) for k, v in vars(GIVEN).items()}
    kinds = {"files": with_files, "mooncake": with_mooncake, "mla": with_mla}
    for name in GIVEN.steps:
        if seconds_left() > 30:
            with step(name):
                kinds[name]()
    write("end", {"seconds": time.monotonic() - BEGAN, "failures": len(RESULTS["failures"])})
    sys.exit(bool(RESULTS["failures"]))


if __name__ == "__main__":
    main()
