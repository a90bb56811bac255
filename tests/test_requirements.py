"""Requirements and misconfigurations: every named test exists, no requirement is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {
    Path(name).stem: (ROOT / name).read_text()
    for name in (
        "tests/requirements.md",
        "docs/misconfigurations.md",
        "tests/tested_misconfigurations.md",
    )
}
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


def names_in(cell: str) -> set[str]:
    """The names in a first column: `R-X-1, 6` is R-X-1 and R-X-6."""
    names, family = set(), ""
    for word in cell.split(", "):
        family = word.rstrip("0123456789") or family
        names.add(family + word.removeprefix(family))
    return names


def mistakes_in(page: str) -> list[str]:
    """The mistakes in a page's tables, in the first column."""
    first = r"^\| ((?!mistake|what|-)[^|]+) \| "
    return re.findall(first, PAGES[page], flags=re.MULTILINE)


@pytest.mark.parametrize("page", ["requirements", "tested_misconfigurations"])
def test_every_test_that_is_named_exists(page):
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGES[page]))
    assert len(named) > 40
    for file, test in named:
        assert re.search(
            rf"^\s*(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE
        ), test


def test_every_requirement_has_an_answer():
    row = r"^\| (\w[\w, -]*\d) \| ([^|]+) \| ([^|]+) \|$"
    rows = re.findall(row, PAGES["requirements"], flags=re.MULTILINE)
    answered = {name for first, _, _ in rows for name in names_in(first)}
    wanted = {f"{family}{n}" for family, most in FAMILIES.items() for n in range(1, most + 1)}
    assert answered == wanted


def test_every_mistake_that_users_read_of_has_a_test():
    assert len(mistakes_in("misconfigurations")) > 50
    assert not set(mistakes_in("misconfigurations")) - set(mistakes_in("tested_misconfigurations"))
    assert "tests/" not in PAGES["misconfigurations"]


def test_every_row_of_the_tested_mistakes_names_its_tests():
    rows = re.findall(r"^\| [^|]+ \| `tests/[^|]+` \|$", PAGES["tested_misconfigurations"], re.M)
    assert len(rows) == len(mistakes_in("tested_misconfigurations")) >= 84
