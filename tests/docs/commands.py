"""The shell commands of the documents' code blocks, and what runs each of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]
PAGES += [ROOT / "examples" / "store_plugin" / "README.md"]
PAGES += [ROOT / "integrations" / "lmcache" / "README.md"]
WITHOUT_COMMANDS = {"DESIGN.md"}  # its indented block is the stored format

GPU = "a GPU"
TESTED_HERE = "tests/docs/test_commands.py"
_EXAMPLES, _SCRIPTS = "tests/examples", "tests/examples/test_scripts.py"
_PLUGIN = f"{_EXAMPLES}/test_store_plugin.py::test_it_passes_its_own_tests"
_KNOWS_ITS_OPTIONS = f"{TESTED_HERE}::test_a_benchmark_of_a_page_knows_its_options"
_MOONCAKES = f"{TESTED_HERE}::test_mooncakes_flags_of_a_page_are_those_of_the_example_script"
_VLLM_ROUTER = (
    "tests/adapters/vllm/test_other_router.py::test_d_loads_what_p_has_saved_behind_vllm_router"
)
_SYSTEMD = "tests/deploy/test_systemd.py"
_OF_SGLANG = "tests/adapters/sglang/test_documented.py::test_the_flags_of_the"

RUN_BY = {
    # pattern of the command: the test or the file that runs it, or GPU
    "make setup": ".ci/run",
    "make quick": ".ci/run",
    "make test": ".ci/run",
    "make check": ".ci/run",
    "make release": "tests/scripts/test_release.py",
    "make docs": "Makefile",  # of `make check`
    "make demo": ".ci/run",
    "make chaos*": ".ci/run",
    "make bench-*": ".ci/run",
    "pip install *pdstore[[]*": f"{TESTED_HERE}::test_an_extra_of_a_page_is_one",
    "pip install examples/store_plugin": _PLUGIN,
    "pytest examples/store_plugin/tests": _PLUGIN,
    "python -m pdstore doctor --store sqlite:*": (
        f"{_EXAMPLES}/test_store_plugin.py::test_doctor_tries_it_by_its_url"
    ),
    "pdstore *": "tests/cli/test_documented.py::test_a_command_of_a_page_runs",
    "export *": f"{TESTED_HERE}::test_a_variable_of_a_page_is_one",
    "(umask 077; openssl rand -hex 32 > seal.key)": f"{TESTED_HERE}::test_the_key_of_a_page_is_one",
    "curl http://127.0.0.1:8000/v1/completions *": (
        f"{_EXAMPLES}/test_mini_server.py::test_the_request_of_the_quickstart_is_answered"
    ),
    "examples/run_prefill.sh": f"{_SCRIPTS}::test_an_engine_is_started_with_the_switch_on",
    "examples/run_decode.sh": f"{_SCRIPTS}::test_an_engine_is_started_with_the_switch_on",
    "examples/run_*.sh --engine sglang *": f"{_OF_SGLANG}_scripts_are_sglangs",
    "examples/run_router.sh": f"{_SCRIPTS}::test_the_router_finds_p_and_d_and_says_how_to_ask",
    "pdstore-router *": "tests/router/test_main.py::test_a_command_of_a_page_has_its_options",
    "examples/run_mooncake.sh *": (
        f"{_EXAMPLES}/test_demo_mooncake.py"
        "::test_the_script_starts_a_pool_and_a_signal_ends_all_of_it"
    ),
    "redis-server *": "tests/examples/test_two_hosts.py::test_the_commands_of_the_page_hand_over",
    "pip install vllm-router": _VLLM_ROUTER,
    "vllm-router *": _VLLM_ROUTER,
    "vllm serve MODEL --kv-events-config *": (
        "tests/adapters/vllm/test_pool_index.py"
        "::test_an_index_of_the_events_of_two_instances_equals_the_pool"
    ),
    "PDSTORE_* vllm serve *": ".ci/run",  # make demo ENGINE=vllm
    "vllm serve MODEL --port *": ".ci/run",
    "sglang serve *": f"{_OF_SGLANG}_page_are_sglangs",
    "lmcache *": (
        "integrations/lmcache/tests/test_documented.py::test_the_flags_of_the_page_are_lmcaches"
    ),
    "mooncake_master *": _MOONCAKES,
    "GLIBC_TUNABLES=* mooncake_client *": _MOONCAKES,
    "docker build *": (
        "tests/deploy/test_deploy.py::test_every_image_is_a_target_of_the_dockerfile_or_a_known_one"
    ),
    "MODEL=* docker compose *": "scripts/check_deploy.sh",
    "kubectl apply -k *": "scripts/check_deploy.sh",
    "deploy/systemd/install.sh *": (
        f"{_SYSTEMD}::test_it_installs_units_and_examples_and_keeps_what_a_user_has_written"
    ),
    "systemctl enable --now *": f"{_SYSTEMD}::test_the_units_lines_start_p_d_and_the_router",
    "benchmarks/device_*": GPU,
    "python -m benchmarks.load --engine vllm *": GPU,
    "python -m benchmarks.swap.bench": GPU,
    "python -m benchmarks.trace.room *": _KNOWS_ITS_OPTIONS,
    "python -m benchmarks.*": f"{TESTED_HERE}::test_a_benchmark_of_a_page_runs",
}
"""The first pattern that fits counts."""


class Command(NamedTuple):
    """A command as a page has it, on one line and without its comment."""

    page: Path
    line: str

    @property
    def runner(self) -> str | None:
        return next(
            (run for pattern, run in RUN_BY.items() if fnmatchcase(self.line, pattern)), None
        )


def commands() -> list[Command]:
    """Every command of every page, each line once."""
    pages = [page for page in sorted(PAGES) if page.name not in WITHOUT_COMMANDS]
    found = {line: Command(page, line) for page in pages for line in lines_of(page)}
    return list(found.values())


def lines_of(page: Path) -> list[str]:
    """The commands of one page, in their order."""
    return [line for block in _blocks(page.read_text()) for line in _lines(block)]


def words(line: str) -> list[str]:
    """The words of a command, without the variables before them."""
    parts = shlex.split(line)
    while parts and re.match(r"[A-Z_]+=", parts[0]):
        del parts[0]
    return parts


def _blocks(text: str) -> Iterator[str]:
    """Fenced blocks of shell, and indented ones, which are all shell."""
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    for match in fence.finditer(text):
        if match[2] == "sh":
            yield match[3]
    for match in re.finditer(
        r"(?<=\n\n)((?:(?: {4}){1,2}\S.*\n(?: {4}.*\n)*))", fence.sub("", text)
    ):
        yield match[1]


def _lines(block: str) -> Iterator[str]:
    """Commands of a block: a line that goes on is indented, or the one before ends with \\."""
    indent = len(block) - len(block.lstrip())
    whole = re.sub(r"\\?\n" + " " * indent + r"(?=  +\S)", " ", block)
    for line in whole.splitlines():
        command = re.sub(r"\s+# .*|\s+#$", "", line).strip()
        if command and not command.startswith("#"):
            yield re.sub(r"\s{2,}", " ", command)
