"""What the marks `misconfiguration` and `requirement` say of the tests that have them.

`python -m tests.support.marked` prints both as tables. The marks are read from the tests' source,
because no environment can import all of them.

Mistakes are those of docs/misconfigurations.md, which has pdstore's message about each;
`pytest -m misconfiguration` makes them all. Requirements come from public reviews of other engines'
pools, asynchronous writers and memory pinning: each defect that they found is one here. The names
(`R-DEV-1`, `C3`) have no other meaning.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "misconfigurations.md"

WITHOUT_TEST = {
    ("R-DEV-6", "a thread that several pools share checks its device at each task"): (
        "does not apply: each pool has threads of its own"
    ),
    (
        "R-AW-2",
        "no test relies on an order of threads; native code runs under a thread sanitizer",
    ): "`.ci/native` builds with ASan, UBSan and TSan",
    ("R-PIN-3", "a rank pins only what is its own"): "staging belongs to one rank",
    ("R-PIN-5", "kernels get device addresses of host memory"): (
        "decided otherwise: no kernel touches host memory"
        " (docs/decisions/022-no-kernel-writes-host.md)"
    ),
    ("R-PIN-13", "the CUDA library is not loaded from a fixed path"): "libpdstore links it",
    ("R-AR-14, R2", "nothing is printed, and log lines are whole"): (
        "the linter's rules `ISC` and `G`"
    ),
    ("R16", "formal rules of another repository"): "do not apply",
}
"""Requirements that no test shows: why not, or what shows it."""


@dataclass(frozen=True)
class Marked:
    """One mark of a row on one test."""

    row: tuple[str, ...]
    note: str
    test: str
    runs: bool


@cache
def marked(mark: str) -> tuple[Marked, ...]:
    """Returns every use of a mark, in the order of the files."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return tuple(
        found
        for file in files
        for found in marks_in(file.read_text(), file.relative_to(ROOT).as_posix(), mark)
    )


def marks_in(source: str, file: str, mark: str) -> Iterator[Marked]:
    """Yields the uses of a mark in a file's source."""
    tree = ast.parse(source)
    of_all = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = of_all + [ast.unparse(each) for each in node.decorator_list]
        is_left_out = any(re.search(r"\bmark\.(skip\b|xfail\b)", each) for each in marks)
        is_test = Path(file).name.startswith("test_") and node.name.startswith("test_")
        for each in node.decorator_list:
            if isinstance(each, ast.Call) and ast.unparse(each.func) == f"pytest.mark.{mark}":
                row = tuple(ast.literal_eval(argument) for argument in each.args)
                note = "".join(ast.literal_eval(keyword.value) for keyword in each.keywords)
                yield Marked(row, note, f"{file}::{node.name}", is_test and not is_left_out)


def rows_of(mark: str) -> dict[tuple[str, ...], list[str]]:
    """Returns the tests of each row."""
    tests = defaultdict(list)
    for each in marked(mark):
        tests[each.row].append(each.test)
    return dict(tests)


def notes() -> Mapping[tuple[str, ...], str]:
    """Returns what is said of some requirements beside their tests."""
    return {each.row: each.note for each in marked("requirement") if each.note} | WITHOUT_TEST


def told_mistakes() -> dict[str, str]:
    """Returns the mistakes that docs/misconfigurations.md has, and what it says pdstore does."""
    row = r"^\| ((?!mistake |what |-)[^|]+) \| ([^|]+) \|"
    return dict(re.findall(row, PAGE.read_text(), re.MULTILINE))


def main() -> None:
    print("| mistake | what pdstore says | tests |\n|---|---|---|")
    tests = rows_of("misconfiguration")
    for mistake, says in told_mistakes().items():
        print(f"| {mistake} | {says} | {', '.join(tests[mistake,])} |")
    print("\n| | requirement | tests, notes |\n|---|---|---|")
    tests = rows_of("requirement")
    for row in sorted(tests.keys() | WITHOUT_TEST.keys()):
        answer = [*tests.get(row, ()), *filter(None, [notes().get(row)])]
        print(f"| {row[0]} | {row[1]} | {', '.join(answer)} |")


if __name__ == "__main__":
    main()
