"""python -m pdstore: commands, exit codes, and errors of one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdstore.cli.main import main


def test_an_error_that_a_user_can_mend_is_one_line_and_exit_code_2(capsys):
    assert main(["doctor", "--store", "gopher://there"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdstore: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["bench"], ["doctor", "--url", "x"]])
def test_an_unknown_command_or_flag_says_how_to_use_it(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m pdstore" in capsys.readouterr().err


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "pdstore", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("native", "doctor"):
        assert command in done.stdout
