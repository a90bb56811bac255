"""The version is written in one place, and everything else reads it there."""

from __future__ import annotations

import re
from pathlib import Path

import pdstore

ROOT = Path(__file__).parent.parent


def test_the_build_reads_the_literal_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'input = "pdstore/__init__.py"' in project
    assert not re.search(r"^version\s*=", project, flags=re.MULTILINE)
    source = (ROOT / "pdstore" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE) == [
        pdstore.__version__
    ]


def test_lmcaches_distribution_and_the_extra_are_of_this_version():
    """`pdstore[lmcache]` brings it, and neither works with another version of the other."""
    extra = re.findall(r'"pdstore-lmcache==(.+?)"', (ROOT / "pyproject.toml").read_text())
    project = (ROOT / "integrations" / "lmcache" / "pyproject.toml").read_text()
    own = re.findall(r'^version = "(.+?)"', project, flags=re.MULTILINE)
    needs = re.findall(r'^dependencies = \["pdstore==(.+?)"\]', project, flags=re.MULTILINE)
    assert extra == own == needs == [pdstore.__version__]


def test_the_changelog_begins_with_what_is_unreleased_and_then_names_this_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert pdstore.__version__ in headings[1]
