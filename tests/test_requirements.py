"""Requirements and misconfigurations: every named test exists, no requirement is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "requirements.md").read_text()
PAGES = {
    name: (ROOT / "docs" / name).read_text() for name in ("requirements.md", "misconfigurations.md")
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


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page):
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGES[page]))
    assert len(named) > 40
    for file, test in named:
        assert re.search(
            rf"^\s*(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE
        ), test


def test_every_requirement_has_an_answer():
    rows = re.findall(r"^\| (\w[\w, -]*\d) \| ([^|]+) \| ([^|]+) \|$", TEXT, flags=re.MULTILINE)
    answered = {name for first, _, _ in rows for name in names_in(first)}
    wanted = {f"{family}{n}" for family, most in FAMILIES.items() for n in range(1, most + 1)}
    assert answered == wanted
