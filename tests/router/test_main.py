"""The command `pdstore-router`: what a page writes, and what it says without its packages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from pdstore.router.main import main
from tests.docs.commands import ROOT, commands

LINES = [each.line for each in commands() if each.line.startswith("pdstore-router ")]


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_a_page_has_its_options(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` ends it after all options were read, so that a wrong value would be told."""
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(line)[1:], "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pdstore-router")


def test_the_script_of_the_examples_has_every_option_of_its_own() -> None:
    text = (ROOT / "examples" / "run_router.sh").read_text()
    said = subprocess.run(
        [sys.executable, "-m", "pdstore.router", "--help"], capture_output=True, text=True
    ).stdout
    options = set(re.findall(r"^#   (--[a-z-]+)", text, re.MULTILINE))
    assert options
    assert options <= set(re.findall(r"--[a-z-]+", said))


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "httpx"])
def test_without_its_packages_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "from pdstore.router.main import main; main(['--decode', 'http://127.0.0.1:1'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"not installed ({missing}" in done.stderr
    assert done.stderr.endswith("pip install 'pdstore[router]'\n")
    assert "Traceback" not in done.stderr


def test_the_extra_has_each_package_that_the_router_imports() -> None:
    files = (ROOT / "pdstore" / "router").glob("*.py")
    text = "".join(file.read_text() for file in files)
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    known = sys.stdlib_module_names | {"pdstore", "opentelemetry", "typing_extensions"}
    own = {"prometheus_client"}  # always installed
    [extra] = re.findall(r"^router = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert imported - known - own == set(re.findall(r'"(\w+)', extra))
