"""Finding: what works needs no remedy, and what does not has one."""

from __future__ import annotations

from pdstore.cli.checks.finding import Level, bad, info, ok, warn


def test_levels_and_remedies():
    made = [ok("a", "b"), info("a", "b"), warn("a", "b", "c"), bad("a", "b", "c")]
    assert [each.level for each in made] == [Level.OK, Level.INFO, Level.WARN, Level.BAD]
    assert [each.remedy for each in made] == ["", "", "c", "c"]
