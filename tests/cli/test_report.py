"""Report: a table for people, and JSON that keeps numbers whole."""

from __future__ import annotations

import json

from pdstore.cli.report import Report, seconds_of


def report() -> Report:
    made = Report("a title", ["what", "ms"], notes=["a note"])
    made.add("put", 1.23456)
    made.add("a longer name", 12)
    made.add("tokens", 65536.0)
    return made


def test_the_table_is_aligned_and_rounds_fractions_to_three_digits():
    assert report().text().splitlines() == [
        "a title",
        "what              ms",
        "put             1.23",
        "a longer name     12",
        "tokens         65536",
        "a note",
    ]


def test_the_json_has_the_numbers_whole_and_names_the_machine():
    found = json.loads(report().json())
    assert found["rows"][:2] == [
        {"what": "put", "ms": 1.23456},
        {"what": "a longer name", "ms": 12},
    ]
    assert (found["title"], found["notes"]) == ("a title", ["a note"])
    assert found["machine"]["cpus"] > 0


def test_a_call_is_timed_once():
    calls = []
    assert seconds_of(lambda: calls.append(1)) >= 0
    assert calls == [1]
