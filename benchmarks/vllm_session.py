"""The session in which vLLM instances are measured: its clock, its results, its instances."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.vllm_instance import Answer, Instance

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
Kind = tuple[dict[str, str], dict[str, Any]]
"""An instance's environment, and the arguments of its LLM."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that a session reads."""
    add = parser.add_argument
    add("--json", type=Path, required=True, help="the file of results")
    add("--pool", type=Path, default=Path("/dev/shm"), help="a memory-backed directory")
    add("--gpus", nargs="+", default=["0"], help="as CUDA_VISIBLE_DEVICES names them")
    add("--runs", type=int, default=3)
    add("--seconds", type=float, default=600, help="for all of it")
    add("--start-seconds", type=float, default=150, help="for one instance")
    add("--llm", default="{}", help="more arguments of LLM, as JSON")
    add("--backend", type=json.loads, default={"attention_backend": "FLASH_ATTN"})
    add("--native", default="require")
    add("--workers", help="PDSTORE_WORKERS; its default otherwise")
    add("--staging", help="PDSTORE_STAGING; its default otherwise")
    add("--budget", default="56GiB")


class Session:
    """Writes what is found, and what fails, into one file as soon as it is known.

    given: the options of `add_options`, with `tokens`, `config`, `kv_bytes`. All are written down.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.logs = given.json.parent / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pool = Path(tempfile.mkdtemp(prefix="pdstore-bench-", dir=given.pool))
        self.vocabulary = given.config["vocab_size"]
        self._began = time.monotonic()
        said = {k: str(v) for k, v in vars(given).items()}
        self.results: dict[str, Any] = {"given": said, "steps": [], "failures": []}

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of a token's KV over all layers."""
        config = self.given.config
        size = {"bfloat16": 2, "float32": 4}[json.loads(self.given.llm).get("dtype", "bfloat16")]
        heads = config["num_key_value_heads"] * config["head_dim"]
        return int(2 * size * heads * config["num_hidden_layers"])

    def seconds_left(self) -> float:
        return float(self._began + self.given.seconds - time.monotonic())

    def write(self, step: str, found: Any) -> None:
        at = time.monotonic() - self._began
        if found is not None:
            self.results["steps"].append({"step": step, "at": at, "found": found})
        self.given.json.write_text(json.dumps(self.results, indent=1))
        print(f"[{at:6.1f}] {step}: {json.dumps(found)[:900]}", flush=True)

    def fail(self, step: str, error: str) -> None:
        self.results["failures"].append({"step": step, "error": error})
        print(error, file=sys.stderr)
        self.write(f"{step} FAILED", None)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Runs a step; a failure in it is written down, and the next step goes on."""
        try:
            yield
        except Exception:
            self.fail(name, traceback.format_exc())

    def end(self) -> None:
        """Ends the process; with an error if anything failed."""
        shutil.rmtree(self.pool, ignore_errors=True)
        failures = len(self.results["failures"])
        self.write("end", {"seconds": time.monotonic() - self._began, "failures": failures})
        sys.exit(bool(failures))

    def prompt_of(self, num_tokens: int, seed: int | str) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(10, self.vocabulary) for _ in range(num_tokens)]

    def files(self) -> str:
        """Returns the URL of a new, empty store over files."""
        return f"file://{self.pool}?budget={self.given.budget}"

    def pdstore_environment(self, store: str, role: str, **more: str) -> dict[str, str]:
        sizes = {"PDSTORE_WORKERS": self.given.workers, "PDSTORE_STAGING": self.given.staging}
        return {
            "PD_TRANSFER_VIA_STORAGE": "1",
            "PDSTORE_STORE": store,
            "PDSTORE_ROLE": role,
            "PDSTORE_NATIVE": self.given.native,
            "PDSTORE_REQUIRE_STORE": "1",
            **{name: size for name, size in sizes.items() if size is not None},
            **more,
        }

    def llm_arguments(self, defaults: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Returns the arguments of LLM: common ones, `defaults`, --llm, `more`; the last wins."""
        arguments = {
            "skip_tokenizer_init": True,
            "seed": 0,
            "dtype": "bfloat16",
            "max_model_len": max(self.given.tokens) + 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": self.given.kv_bytes,
        }
        return {**arguments, **defaults, **json.loads(self.given.llm), **more}

    def dummy_model(self, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Returns the arguments of LLM for a model that is nothing but its configuration."""
        name = hashlib.sha256(json.dumps(config).encode()).hexdigest()[:8]
        directory = self.logs / f"model-{name}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        }
        model = {"model": str(directory.resolve()), "load_format": "dummy"}
        return self.llm_arguments({"compilation_config": graphs}, **model, **more)

    @contextlib.contextmanager
    def instances(self, **kinds: Kind) -> Iterator[dict[str, Instance]]:
        """Starts instances at once; those that do not start are left out."""
        started = {
            name: Instance(name, self.logs / f"{name}.log", *kind, self.seconds_left)
            for name, kind in kinds.items()
        }
        ready: dict[str, Instance] = {}
        try:
            for name, each in started.items():
                with self.step(f"start {name}"):
                    limit = max(10.0, min(self.given.start_seconds, self.seconds_left()))
                    self.write(f"start {name}", each.start(limit))
                    ready[name] = each
            yield ready
        finally:
            for each in started.values():
                each.dismiss()
            for each in started.values():
                each.stop()


def distance(one: Answer, other: Answer) -> float | None:
    """Returns the largest difference of a logprob that both name, up to where answers part."""
    worst = None
    for i, (a, b) in enumerate(zip(one["logprobs"], other["logprobs"], strict=False)):
        both = [abs(a[token] - b[token]) for token in a if token in b]
        worst = max([worst or 0.0, *both]) if both else worst
        if one["ids"][i] != other["ids"][i]:
            break
    return worst


def loaded(name: str, answer: Answer, num_bytes: int) -> Answer:
    """Returns the facts of a load, from the answer that follows it."""
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


def medians(rows: list[Answer]) -> Answer:
    """Returns the median of each field that is a number in any row."""
    names = sorted({k for row in rows for k, v in row.items() if isinstance(v, (int, float))})
    return {k: median(row[k] for row in rows if row.get(k) is not None) for k in names}
