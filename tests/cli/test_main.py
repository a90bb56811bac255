"""main: exit statuses, errors of one line, and a start that loads little."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdstore.cli.main import main
from tests.support.command import run


def test_an_error_that_a_user_can_mend_is_one_line_and_exit_status_2():
    ran = run("doctor", "--store", "gopher://there")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("pdstore: bad store URL 'gopher://there'")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["bench"], ["doctor", "--url", "x"], ["inspect"]])
def test_an_unknown_command_or_flag_says_how_to_use_it(arguments, capsys):
    assert main(arguments) == 2
    assert "Usage: pdstore" in capsys.readouterr().err


def test_help_loads_no_library_but_its_own():
    code = """
import sys
from pdstore.cli.main import main
assert main(["--help"]) == 0
heavy = {"torch", "numpy", "pydantic", "rich", "redis", "mooncake"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_without_the_extra_it_says_what_to_install():
    code = """
import sys
sys.modules["typer"] = None
from pdstore.cli.main import main
raise SystemExit(main(["--help"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("pip install 'pdstore[cli]'\n")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_seen_enough_is_no_error(filled_file):
    command = f"'{sys.executable}' -m pdstore ls --limit 0 --store '{filled_file}' | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", ["", "--json -"])
def test_output_that_cannot_be_written_is_one_line(options, filled_file):
    command = f"'{sys.executable}' -m pdstore ls --store '{filled_file}' {options} >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "pdstore: cannot write standard output: No space left on device\n"
