"""Answer: tables for people, JSON for machines, and a bad path found before the work."""

from __future__ import annotations

import json

import pytest

from pdstore.cli import answer
from pdstore.cli.answer import Answer, Output, heading, muted, table
from pdstore.errors import ConfigError
from tests.support.command import run

ANSWER = Answer({"a": 1}, [heading("title"), table(["what", ">ms"], [["put", "12"]]), muted("end")])


def test_people_see_an_aligned_table(capsys):
    Output(None).emit(ANSWER)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "title"
    assert lines[1].split() == ["what", "ms"]
    assert lines[-2:] == ["put    12", "end"]


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


def test_a_terminal_is_told_what_takes_its_time(file_url):
    err = run("du", "--store", file_url, FORCE_COLOR="1").err
    assert err.index("loading …") < err.index("listing")


def test_quantities_are_said_as_people_read_them():
    sizes = [None, 0, 999, 1536, 1023 << 20, 5 << 50]
    said = ["-", "0 B", "999 B", "1.5 KiB", "0.999 GiB", "5.12e+03 TiB"]
    assert [answer.size(each) for each in sizes] == said
    ages = [None, 8.2, 720, 10_800, 432_000]
    assert [answer.age(each) for each in ages] == ["-", "8 s", "12 min", "3 h", "5 d"]
    assert [answer.duration(each) for each in (0.00031, 1.23)] == ["0.31 ms", "1.23 s"]
    assert answer.count(1234567) == "1,234,567"
    assert [answer.counted(n, "value") for n in (0, 1)] == ["0 values", "1 value"]
