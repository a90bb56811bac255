"""The house rules that a program can check: sizes, budgets, private state, docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "pdstore", ROOT / "tests"
MAX_LINES = {"pdstore": 450, "examples": 450, "benchmarks": 450, "integrations": 450, "tests": 450}
MAX_LINES_OF_AN_INTEGRATION = 980
MAX_LINES_OF_A_FUNCTION = 40
READ_WITH_OTHERS = 60
"""A module of fewer lines is read with its neighbours, and should stand with them."""

BUDGET = {
    "lines": 28_300,
    "files": 248,
    "small modules": 61,
    "statements": 17_450,
    "classes": 356,
    "protocols": 31,
    "packed assignments": 126,
    "lines of native sources": 5_400,
    "lines of tests": 46_400,
    "lines of benchmarks, examples and integrations": 16_600,
}
"""Limits of the package and its neighbours. A change may lower a number, never raise it.

"packed assignments" are `self.a, self.b = a, b`, which save lines and no reading.
"""
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
        for file in python_files("pdstore", "examples", "benchmarks", "integrations")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_without_docstring(node) > MAX_LINES_OF_A_FUNCTION
    )


def lines_of(files: Iterable[str]) -> int:
    return sum(len((ROOT / file).read_text().splitlines()) for file in files)


def is_packed(node: ast.AST) -> bool:
    """True for `self.a, self.b = a, b`: assignments that share a line to save one."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and all(is_own(target) for target in node.targets[0].elts)
    )


def is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)


@cache
def counts() -> dict[str, int]:
    files = python_files("pdstore")
    nodes = [node for file in files for node in ast.walk(tree_of(file))]
    native = [path for path in native_sources() if not {"tests", "bench"} & set(path.parts)]
    modules = [file for file in files if Path(file).stem not in ("__init__", "__main__")]
    return {
        "lines": lines_of(files),
        "files": len(files),
        "small modules": sum(lines_of([file]) < READ_WITH_OTHERS for file in modules),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "protocols": sum(map(is_protocol, nodes)),
        "packed assignments": sum(map(is_packed, nodes)),
        "lines of native sources": lines_of(str(path) for path in native),
        "lines of tests": lines_of(python_files("tests", "integrations/lmcache/tests")),
        "lines of benchmarks, examples and integrations": lines_of(
            python_files("benchmarks", "examples", "integrations/lmcache/pdstore_lmcache")
        ),
    }


@pytest.mark.parametrize("what", BUDGET)
def test_the_house_stays_within_its_budget(what):
    assert counts()[what] <= BUDGET[what]


def test_lmcaches_distribution_stays_small():
    files = python_files("integrations/lmcache/pdstore_lmcache")
    assert 0 < lines_of(files) <= MAX_LINES_OF_AN_INTEGRATION


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
