"""The house rules that a program can check: sizes, circles, private state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.house import (
    ROOT,
    counts,
    files_of_folders,
    imported_by,
    is_own,
    is_packed,
    native_sources,
    python_files,
    tree_of,
)

MAX_LINES = {"pdstore": 450, "examples": 450, "benchmarks": 450, "integrations": 450, "tests": 450}
MAX_LINES_OF_A_FUNCTION = 40
MAX_FILES_OF_A_FOLDER = 15
NONE_OF = ("small modules", "modules in circles")
"""Counts of `python -m tests.support.house` that are always 0. Totals are printed, not limited."""

OF_LIBRARIES = {
    *("_replace", "_asdict", "_fields", "_fields_", "_exit"),  # named tuples, ctypes, os
    "_value_",  # enum's
    "_Hash",  # hashlib's type, which has no public name
    *("_name", "_kwargs", "_labelnames", "_labelvalues", "_documentation"),  # prometheus_client's
    *("_registry", "_is_pdstores"),  # vLLM's table of connectors; our mark on vLLM's function
    "_all_token_ids",  # vLLM's request has no method that drops a token, and a state needs that
    "_truncate_mamba_request_for_prefill",  # vLLM's own drop of that token, beside pdstore's
    "_input_fits_in_drafter",  # vLLM's runner, which says nowhere else when it runs a draft model
    *("_sleep", "_version"),  # torch's
    *("_page_backup", "_page_transfer", "_storage_hit_query"),  # SGLang's, which its threads call
    "_sync_prefetch_hit_query",
    *("_page_get_zero_copy", "_page_set_zero_copy"),
}
"""Private only by their spelling, or without a public form."""


@pytest.mark.requirement(
    "R-AR-11, R13, R14", "tests check contracts, and files, functions and folders stay small"
)
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


@pytest.mark.parametrize("what", NONE_OF)
def test_the_house_has_none_of(what):
    assert counts()[what] == 0


def test_a_folder_has_few_files():
    too_many = {
        folder: number
        for folder, number in files_of_folders().items()
        if number > MAX_FILES_OF_A_FOLDER
    }
    assert not too_many


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


@pytest.mark.requirement("R-AW-6", "state is reached by methods only")
def test_no_module_reaches_into_private_state_of_another():
    assert not sorted(
        f"reach: {file}: {name}"
        for file in python_files(*MAX_LINES)
        for name in reaches_of(tree_of(file))
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pdstore.cli.app",
        "from pdstore.cli import app",
        "from pdstore.cli.app import run",
        "from . import app",
        "from .app import run",
        "from ..cli.app import run",
        "def late():\n    from pdstore.cli.app import run",
        "if TYPE_CHECKING:\n    from pdstore.cli.app import run",
        "importlib.import_module('pdstore.cli.app')",
        "import_module('.app', __package__)",
        "__import__('pdstore.cli.app')",
        "run('pdstore.cli.app.run')\ndef run(name):\n    importlib.import_module(name)",
    ],
)
def test_an_import_is_counted_in_every_form(source):
    names = set(imported_by(ast.parse(source), package="pdstore.cli"))
    assert names & {"pdstore.cli.app", "pdstore.cli.app.run"}


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("a, b = c, d", True),
        ("self.a, self.b = a, b", True),
        ("a, self.b = 0, c.d", True),
        ("a, b = b, a", False),
        ("job, self._job = self._job, None", False),
        ("a, b = pair", False),
        ("a, b = c()", False),
    ],
)
def test_assignments_that_share_a_line_are_packed_but_no_swap(line, is_one):
    assert is_packed(ast.parse(line).body[0]) is is_one
