"""Runs `vllm serve` with the settings of a small P/D pair: `python -m examples.vllm_serve`.

    python -m examples.vllm_serve --model DIR [--role ROLE] [--port N] [--tiny] [VLLM OPTIONS]

Only the environment turns pdstore on: PD_TRANSFER_VIA_STORAGE, PDSTORE_ROLE (--role sets it) and
PDSTORE_STORE. vLLM is told nothing of it, and this process becomes vLLM.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

# The user's own environment wins over each of these.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else each instance takes half of the host's memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all instances bind themselves to the same cores
    "OMP_NUM_THREADS": "1",  # P, D and more share the cores, and sums have one order
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: no third process for the worker, 8 s sooner
}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is reported to anyone
    "HF_HUB_OFFLINE": "1",  # --model is a directory: nothing is asked for
}

TINY = (
    "--enforce-eager",  # compiling takes longer than all the demo's prompts
    "--dtype=float32",  # logprobs can be compared: bfloat16 has ties
    "--block-size=64",  # pages of the CPU backend: a multiple of 32
    "--max-model-len=2048",
    "--num-gpu-blocks-override=128",  # 8192 tokens; what VLLM_CPU_KVCACHE_SPACE gives stays unused
    "--max-num-seqs=8",
    "--max-num-batched-tokens=256",  # longer prompts are prefilled in chunks
    "--no-enable-prefix-caching",  # what D has not computed came from the pool
    "--shutdown-timeout=5",  # else SIGTERM kills the engine, and saves with it
    "--disable-uvicorn-access-log",
)
"""Options for a tiny checkpoint: a quick start, little memory, answers that can be compared."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Replaces this process by `vllm serve`."""
    given, others = _parser().parse_known_args(arguments)
    try:
        is_cpu = version("vllm").endswith("+cpu")
    except PackageNotFoundError:
        sys.exit("no vLLM in this environment; to try it on a CPU: make setup-vllm")
    defaults = ENVIRONMENT | (CPU_ENVIRONMENT if is_cpu else {})
    environment = {**defaults, **os.environ, "PDSTORE_ROLE": given.role}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", given.model]
    command += ["--host", "127.0.0.1", "--port", str(given.port), *(TINY if given.tiny else ())]
    os.execve(sys.executable, [*command, *others], environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.vllm_serve",
        description="One vLLM instance; other options are vLLM's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint's directory")
    add("--role", choices=("both", "prefill", "decode"), default="both")
    add("--port", type=int, default=8000)
    add("--tiny", action="store_true", help="options for a tiny checkpoint")
    return parser


if __name__ == "__main__":
    main()
