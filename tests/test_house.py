"""The house rules that a program can check: sizes, mirrored tests, private state, docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "pdstore", ROOT / "tests"
MAX_LINES = {"pdstore": 300, "examples": 300, "benchmarks": 300, "tests": 400}
MAX_LINES_OF_A_FUNCTION = 40
RIDDLES = {"Who", "What", "That", "Whether", "And", "As", "How", "Those", "It"}
"""First words that stand for a subject instead of saying what a thing is or does."""

OF_LIBRARIES = {
    *("_replace", "_asdict", "_fields", "_fields_", "_exit"),  # named tuples, ctypes, os
    "_Hash",  # hashlib's type, which has no public name
    *("_name", "_kwargs", "_labelnames", "_labelvalues", "_documentation"),  # prometheus_client's
    *("_registry", "_is_pdstores"),  # vLLM's table of connectors; our mark on vLLM's function
    "_sleep",  # torch.cuda's
    *("_page_backup", "_page_transfer", "_storage_hit_query"),  # SGLang's, which its threads call
    *("_page_get_zero_copy", "_page_set_zero_copy"),
}
"""Private only by their spelling, or without a public form."""

TESTED_ELSEWHERE = {
    "pdstore/errors.py": "exceptions carry what they are given",
    "pdstore/testing/": "tests themselves, run by tests/store/test_conformance.py",
}


def python_files(*folders: str) -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    )


def native_sources() -> list[Path]:
    return [path for path in (ROOT / "csrc").rglob("*.*") if "third_party" not in path.parts]


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def test_no_file_is_too_long():
    assert not sorted(
        f"too long: {file}"
        for folder, most in MAX_LINES.items()
        for file in python_files(folder)
        if len((ROOT / file).read_text().splitlines()) > most
    )


def test_no_native_source_is_too_long():
    assert not sorted(
        f"too long: {path.relative_to(ROOT)}"
        for path in native_sources()
        if len(path.read_text().splitlines()) > MAX_LINES["pdstore"]
    )


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    words = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - (len(words.splitlines()) if words else 0)


def test_no_function_is_too_long():
    assert not sorted(
        f"too long: {file}: {node.name}"
        for file in python_files("pdstore", "examples", "benchmarks")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_without_docstring(node) > MAX_LINES_OF_A_FUNCTION
    )


def has_logic(tree: ast.Module) -> bool:
    """Tells modules that compute something from those that only name, declare or re-export."""
    return any(
        not isinstance(statement, ast.Expr | ast.Pass | ast.Raise)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for statement in node.body
    )


def test_tests_mirror_the_package():
    wanted = {
        file: f"tests/{Path(file).relative_to('pdstore').parent}/test_{Path(file).stem}.py"
        for file in python_files("pdstore")
        if has_logic(tree_of(file)) and not file.startswith(tuple(TESTED_ELSEWHERE))
    }
    assert not sorted(f"untested: {f}" for f, test in wanted.items() if not (ROOT / test).exists())


def private_names(tree: ast.Module) -> set[str]:
    """Names with an underscore that a module itself defines."""
    return {
        name
        for node in ast.walk(tree)
        for name in (
            getattr(node, "name", None),
            getattr(node, "attr", None) if is_own(node) else None,
            getattr(node, "id", None) if isinstance(getattr(node, "ctx", None), ast.Store) else "",
        )
        if name and name.startswith("_")
    }


def is_own(node: ast.AST) -> bool:
    """True if a node is an attribute of `self` or `cls`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def reaches_of(tree: ast.Module) -> Iterator[str]:
    """Private names of other modules that a module uses, also by `setattr` and by import."""
    own = private_names(tree) | OF_LIBRARIES
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not is_own(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "patch"):
            said = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [str(value).rpartition(".")[2] for value in said if isinstance(value, str)]
        yield from (n for n in names if re.match(r"_[A-Za-z]", n) and n not in own)


def test_no_module_reaches_into_private_state_of_another():
    assert not sorted(
        f"reach: {file}: {name}"
        for file in python_files(*MAX_LINES)
        for name in reaches_of(tree_of(file))
    )


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each docstring, those behind constants and fields too."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield node.lineno, text.value.strip()


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of the first line of each C++ comment that has lines of its own."""
    is_inside = False
    for number, line in enumerate(source.splitlines(), 1):
        is_comment = line.lstrip().startswith("//")
        if is_comment and not is_inside:
            yield number, line.lstrip().removeprefix("//").lstrip()
        is_inside = is_comment


def is_riddle(text: str) -> bool:
    return text.split(None, 1)[:1] != [] and text.split(None, 1)[0].rstrip(",:") in RIDDLES


def test_a_docstring_begins_with_a_verb_or_a_noun_that_stands_alone():
    assert not sorted(
        f"{file}:{line}: {text[:50]}"
        for file in python_files(*MAX_LINES)
        for line, text in docstrings_of(tree_of(file))
        if is_riddle(text)
    )


def test_a_native_comment_begins_with_a_verb_or_a_noun_that_stands_alone():
    assert not sorted(
        f"{path.name}:{line}: {text[:50]}"
        for path in native_sources()
        for line, text in comments_of(path.read_text())
        if is_riddle(text)
    )
