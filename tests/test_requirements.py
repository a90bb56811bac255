"""Marks on tests hold the requirements and the mistakes of users: none lacks a test that runs."""

from __future__ import annotations

import pytest

from tests.support.marked import WITHOUT_TEST, marked, marks_in, notes, rows_of, told_mistakes

FAMILIES = {
    "R-DEV-": 12,
    "R-AW-": 20,
    "R-PIN-": 13,
    "R-CAP-": 2,
    "R-AR-": 14,
    "R-X-": 8,
    "R": 27,
    "C": 19,
}


def names_in(names: str) -> set[str]:
    """The names that a mark has: `R-X-1, 6` is R-X-1 and R-X-6."""
    found, family = set(), ""
    for word in names.split(", "):
        family = word.rstrip("0123456789") or family
        found.add(family + word.removeprefix(family))
    return found


@pytest.mark.parametrize("mark", ["misconfiguration", "requirement"])
def test_every_mark_is_on_a_test_that_runs(mark):
    assert len(marked(mark)) > 70
    assert [each.test for each in marked(mark) if not each.runs] == []


MARK = '@pytest.mark.requirement("C0", "it rains")'


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        (f"{MARK}\ndef test_x():\n    pass", True),
        (f"class TestX:\n    {MARK}\n    async def test_x(self):\n        pass", True),
        (f"@pytest.mark.skip\n{MARK}\ndef test_x():\n    pass", False),
        (f"pytestmark = pytest.mark.xfail\n{MARK}\ndef test_x():\n    pass", False),
        (f"{MARK}\ndef helper():\n    pass", False),
    ],
)
def test_a_test_that_is_skipped_or_is_none_does_not_run(source, runs):
    [found] = marks_in(source, "tests/test_x.py", "requirement")
    assert (found.row, found.runs) == (("C0", "it rains"), runs)


def test_each_mistake_has_a_test_and_tells_what_the_user_did_and_what_pdstore_says():
    told = told_mistakes()
    assert len(told) >= 133
    marked = {mistake for (mistake,) in rows_of("misconfiguration")}
    assert sorted(told.keys() ^ marked) == []
    assert all(mistake.strip(" -") and says.strip(" -") for mistake, says in told.items())


def test_each_requirement_has_a_test_or_a_reason_why_not():
    rows = [*rows_of("requirement"), *WITHOUT_TEST]
    named = [name for names, _ in rows for name in names_in(names)]
    wanted = {f"{family}{n}" for family, most in FAMILIES.items() for n in range(1, most + 1)}
    assert set(named) == wanted
    assert all(text for _, text in rows)
    assert all(notes().values())
