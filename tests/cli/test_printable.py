"""printable: nothing that a terminal would obey."""

from __future__ import annotations

import pytest

from pdstore.cli.printable import printable


@pytest.mark.parametrize("text", ["two\nlines", "→ ü 字", ""])
def test_text_and_line_ends_stay(text):
    assert printable(text) == text


@pytest.mark.parametrize("control", ["\x1b", "\x07", "\r", "\x9b", "\x00", "\u202e", "\udcff"])
def test_control_characters_do_not(control):
    assert printable(f"a{control}b") == "a?b"
