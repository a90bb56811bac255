"""Answer: tables for people, JSON for machines, and a bad path found before the work."""

from __future__ import annotations

import json

import pytest

from pdstore.cli.answer import Answer, Output, heading, muted, table
from pdstore.errors import ConfigError

ANSWER = Answer({"a": 1}, [heading("title"), table(["what", ">ms"], [["put", "12"]]), muted("end")])


def test_machines_get_json_and_nothing_else(capsys, tmp_path):
    Output("-").emit(ANSWER)
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    path = tmp_path / "answer.json"
    path.write_text("old" * 100)
    Output(str(path)).emit(ANSWER)
    assert json.loads(path.read_text()) == {"a": 1}
    assert capsys.readouterr().out == ""


def test_text_that_others_chose_is_no_instruction(capsys):
    chosen = "[/] [red]a[/red] \x1b]0;title\x07 \udcff"
    Output(None).emit(Answer({}, [table([""], [[chosen]]), chosen]))
    shown = "[/] [red]a[/red] ?]0;title? ?"
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [shown, shown]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere"):
        Output(str(tmp_path / "nowhere" / "x"))
