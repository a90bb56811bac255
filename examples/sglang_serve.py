"""Runs SGLang with pdstore behind its HiCache: `python -m examples.sglang_serve`.

    python -m examples.sglang_serve --model DIR [--role ROLE] [--port N] [--dry-run] [SGLANG'S OWN]

P and D are started alike: only the environment tells them apart (PDSTORE_ROLE, which --role sets).
PD_TRANSFER_VIA_STORAGE=1 turns pdstore on, and PDSTORE_STORE names the pool. This process becomes
SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec

EXTRA_CONFIG = {
    "backend_name": "pdstore",
    "module_path": "pdstore.adapters.sglang",
    "class_name": "PDStoreHiCache",
    "interface_v1": 1,
    "prefetch_threshold": 64,  # tokens below which SGLang does not ask; 256 by default
}

HICACHE = (
    "--page-size=64",
    "--enable-hierarchical-cache",
    "--hicache-ratio=2",
    "--hicache-mem-layout=page_first",
    "--hicache-write-policy=write_through",  # P stores a prompt when it has computed it
    "--hicache-storage-prefetch-policy=wait_complete",  # every wait of pdstore has a bound
    "--hicache-storage-backend=dynamic",
    f"--hicache-storage-backend-extra-config={json.dumps(EXTRA_CONFIG)}",
    "--enable-cache-report",  # usage.prompt_tokens_details.cached_tokens: what D did not compute
)

_SHOWN = ("PD_TRANSFER_VIA_STORAGE", "PDSTORE_ROLE", "PDSTORE_STORE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Replaces this process by SGLang's server, or prints its command."""
    given, others = _parser().parse_known_args(arguments)
    environment = {"HF_HUB_OFFLINE": "1", **os.environ, "PDSTORE_ROLE": given.role}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", given.model]
    command += ["--served-model-name", given.served_model_name or given.model]
    command += ["--host", "127.0.0.1", "--port", str(given.port), *HICACHE, *others]
    if given.dry_run:
        shown = [
            f"{name}={shlex.quote(environment[name])}" for name in _SHOWN if name in environment
        ]
        print(*shown, shlex.join(command))
    elif find_spec("sglang") is None:
        sys.exit("no SGLang in this environment: docs/sglang.md says how to install it")
    else:
        os.execve(sys.executable, command, environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.sglang_serve",
        description="One SGLang instance; other options are SGLang's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint's directory")
    add("--served-model-name", help="the name that clients ask for; unset: --model")
    add("--role", choices=("both", "prefill", "decode"), default="both")
    add("--port", type=int, default=8000)
    add("--dry-run", action="store_true", help="print the command and start nothing")
    return parser


if __name__ == "__main__":
    main()
