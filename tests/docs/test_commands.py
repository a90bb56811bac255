"""Every shell command on a page is run by a test, or needs a GPU and says so."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

from pdstore.settings import Settings, variable_of
from pdstore.store import open_store
from pdstore.store.seal import read_seal_keys
from tests.docs.commands import GPU, ROOT, RUN_BY, commands, words

COMMANDS = commands()
LINES = [command.line for command in COMMANDS]


def run_by(name: str) -> list[str]:
    """The commands that a test of this file runs."""
    return [c.line for c in COMMANDS if (c.runner or "").endswith(f"::{name}")]


def test_every_command_is_run_by_something():
    assert len(COMMANDS) > 60
    assert not [(command.page.name, command.line) for command in COMMANDS if not command.runner]


def test_the_list_has_no_command_that_is_on_no_page():
    assert not [p for p in RUN_BY if not any(fnmatchcase(line, p) for line in LINES)]


@pytest.mark.parametrize("runner", sorted(set(RUN_BY.values()) - {GPU}))
def test_what_runs_a_command_exists(runner):
    file, _, test = runner.partition("::")
    text = (ROOT / file).read_text()
    if test:
        assert re.search(rf"^(?:async )?def {test}\(", text, re.MULTILINE)
        return
    for command in (c for c in COMMANDS if c.runner == runner):
        program = words(command.line)[:2]
        target = {"vllm serve": "make demo ENGINE=vllm", "make docs": "docs:"}
        wanted = target.get(" ".join(program), " ".join(program))
        assert wanted.removeprefix("docker ") in text or program[0] in ("docker", "kubectl"), wanted


def test_a_command_that_needs_a_gpu_stands_below_the_name_of_one():
    for command in (c for c in COMMANDS if c.runner == GPU):
        text = re.sub(r"\s*\\\n +", " ", command.page.read_text())  # a command on one line
        section = text[: text.index(command.line)].rpartition("\n## ")[2]
        assert re.search(r"H\d00|GPU", section), command.line


def test_mooncakes_flags_of_a_page_are_those_of_the_example_script():
    script = (ROOT / "examples" / "run_mooncake.sh").read_text()
    lines = run_by("test_mooncakes_flags_of_a_page_are_those_of_the_example_script")
    assert len(lines) == 2
    for line in lines:
        assert not [flag for flag in re.findall(r"--\w+=", line) if flag not in script]


@pytest.mark.parametrize("line", run_by("test_an_extra_of_a_page_is_one"))
def test_an_extra_of_a_page_is_one(line):
    text = (ROOT / "pyproject.toml").read_text().partition("[project.urls]")[0]
    for extra in re.search(r"pdstore\[(.*)\]", line)[1].split(","):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), line


def variables_of(line: str) -> dict[str, str]:
    """The variables that a command sets for itself or exports."""
    pairs = [word.partition("=") for word in shlex.split(line) if re.match(r"[A-Z_]+=", word)]
    return {name: value for name, _, value in pairs}


def test_a_variable_of_a_page_is_one(tmp_path):
    known = {variable_of(field) for field in Settings.model_fields}
    found = [pair for line in LINES for pair in variables_of(line).items()]
    assert {name for name, _ in found if name.startswith(("PD_", "PDSTORE_"))} <= known
    stores = [value for name, value in found if name == "PDSTORE_STORE"]
    assert len(stores) >= 5
    for url in stores:
        here = url.replace("///dev/shm/", f"//{tmp_path}/")
        here = here.replace("shm://pool?size=64GiB", f"shm://pool?size=8MiB&dir={tmp_path}")
        open_store(here, Settings()).close()


def test_the_key_of_a_page_is_one(tmp_path):
    [line] = run_by("test_the_key_of_a_page_is_one")
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    assert len(read_seal_keys(tmp_path / "seal.key")) == 1


BENCHMARKS = [line for line in LINES if "python -m benchmarks." in line]


@pytest.mark.parametrize("line", BENCHMARKS)
def test_a_benchmark_of_a_page_knows_its_options(line, monkeypatch, capsys):
    module, *arguments = words(line)[2:]
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    for name in (module, f"{module}.__main__"):  # another test may have imported it
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(module, run_name="__main__")
    assert caught.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {a.strip("[]") for a in arguments if a.strip("[").startswith("--")} <= known


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", run_by("test_a_benchmark_of_a_page_runs"))
def test_a_benchmark_of_a_page_runs(line, tmp_path):
    program = [sys.executable, *words(re.sub(r"\[.*\]", "", line))[1:]]
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": 500 * n, "input_length": 1536, "output_length": 8, "hash_ids": [0, n % 7, n]}
        for n in range(100)
    ]
    trace.write_text("\n".join(map(json.dumps, requests)))
    given = {"FILE": trace if "trace" in line else tmp_path / "out.json", "TRACE": trace}
    arguments = [str(given.get(word, word)) for word in program]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
