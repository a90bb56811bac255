"""The version changes when a format does: what this code writes against what releases wrote."""

from __future__ import annotations

import pytest

import pdstore
from pdstore.format import block, keys
from tests.format import released
from tests.format.released import formats, recorded


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def check(version: str) -> None:
    last = list(recorded())[-1]
    now, then = formats(), recorded()[last]
    changed = {name: (then.get(name), now[name]) for name in now if then.get(name) != now[name]}
    assert not changed or numbers(version) > numbers(last), (
        f"{changed} differ from what {last} writes: raise __version__ in pdstore/__init__.py, the"
        " numbers that tests/test_version.py names, and write a heading into CHANGELOG.md"
    )


def test_the_version_is_higher_than_that_of_a_release_with_other_formats():
    check(pdstore.__version__)


def test_releases_stand_in_order_and_none_is_higher_than_this_version():
    versions = [numbers(version) for version in recorded()]
    assert versions == sorted(versions)
    assert versions[-1] <= numbers(pdstore.__version__)


@pytest.mark.parametrize(
    ("module", "name"), [(keys, "FORMAT_VERSION"), (block, "VERSION"), (released, "ABI")]
)
def test_another_format_needs_another_version(module, name, monkeypatch):
    monkeypatch.setattr(module, name, 99)
    if name == "FORMAT_VERSION":
        monkeypatch.setattr(released, name, 99)
    with pytest.raises(AssertionError, match="raise __version__"):
        check(list(recorded())[-1])
    check("99.0.0")
