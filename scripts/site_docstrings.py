"""Turns lines such as `name: its meaning` in docstrings into lists, for the site's API page."""

from __future__ import annotations

import re

import griffe

_LINE = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")
_MORE = re.compile(r"^  (?=\S)")


class ListedNames(griffe.Extension):
    """Makes each run of such lines, with those indented below them, a Markdown list."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    lines, is_in_list = [], False
    for line in text.splitlines():
        begins = _LINE.match(line) is not None
        if begins:
            lines += [""] if not is_in_list else []
            line = _LINE.sub(r"- **\1**: ", line)
        elif is_in_list and _MORE.match(line):
            line = f"  {line}"
        elif is_in_list and line:
            lines.append("")
        lines.append(line)
        is_in_list = begins or (is_in_list and line.startswith("    "))
    return "\n".join(lines)
