"""The commands: help, errors, JSON and tables."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

import pdstore
from pdstore.cli.answer import Answer, emit, muted, table
from pdstore.cli.app import app
from pdstore.cli.main import main
from pdstore.format.keys import FORMAT_VERSION
from tests.support.command import run


def test_an_error_that_a_user_can_mend_is_one_line_and_exit_status_2():
    ran = run("doctor", "--store", "gopher://there")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("pdstore: bad store URL 'gopher://there'")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["selftest"], ["doctor", "--url", "x"], ["inspect"]])
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


def test_every_command_has_a_line_of_help_and_json(capsys):
    commands = typer.main.get_command(app).commands
    names = {"ls", "du", "inspect", "purge", "doctor", "explain", "bench", "size"}
    assert set(commands) == names
    for name, command in commands.items():
        assert command.help, name
        assert main([name, "--help"]) == 0
        said = capsys.readouterr().out
        assert "--json" in said
        assert "--json FILE" not in said, "it takes no word: a pool's URL may follow it"


def test_json_takes_no_word_of_what_follows(filled_file, prompts):
    for words in (["--json", "--store", filled_file], ["--store", filled_file, "--json"]):
        assert len(run("du", *words).json["namespaces"]) == 2
    name = prompts[0].namespace.hex
    assert len(run("ls", "--json", name, "--store", filled_file).json["values"]) == 3


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    said = f"pdstore {pdstore.__version__}, stored format {FORMAT_VERSION}"
    assert capsys.readouterr().out == said + "\n"


ANSWER = Answer({"a": 1}, [table(["what", ">ms"], [["put", "12"]]), muted("end")])


def test_machines_get_json_and_nothing_else(capsys):
    emit(ANSWER, is_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_text_that_others_chose_is_no_instruction(capsys):
    chosen = "[/] [red]a[/red] \x1b]0;title\x07 \udcff"
    emit(Answer({}, [table([""], [[chosen]]), chosen]), is_json=False)
    shown = "[/] [red]a[/red] ?]0;title? ?"
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [shown, shown]
