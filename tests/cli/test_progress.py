"""Progress: a scan that takes more than a second tells how far it is, on a terminal alone."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdstore.cli.progress import scanned, tell, working
from tests.support.command import run


@pytest.mark.parametrize(
    ("seconds_an_item", "told"),
    [(0.0002, []), (0.0004, ["3,000 values of a pool …", "4,000 values of a pool …"])],
)
def test_a_scan_is_silent_for_a_second_and_then_tells_its_count(seconds_an_item, told):
    now = 0.0

    def items():
        nonlocal now
        for number in range(4500):
            now += seconds_an_item
            yield number

    said: list[str] = []
    found = list(scanned(items(), "values of a pool", lambda: now, said.append))
    assert found == list(range(4500))
    assert said == told


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_shows_it(is_terminal):
    out = io.StringIO()
    with working(Console(file=out, force_terminal=is_terminal)):
        tell("12,000 values …")
    assert ("12,000 values" in out.getvalue()) is is_terminal
    if not is_terminal:
        assert out.getvalue().strip() == ""


def test_programs_get_no_progress(filled_file):
    assert run("du", "--store", filled_file).err == ""
