"""The documents are current, and names are those of the glossary."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pdstore.settings import Settings, variable_of
from tests.docs.tables import TABLES
from tests.support.house import native_sources, python_files
from tests.test_modules import FLOORS

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("deploy/*.md")])
DOCUMENTS += DECISIONS


def anchors_of(document: Path) -> set[str]:
    """The anchors that a Markdown viewer makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.misconfiguration("`python -O`")
@pytest.mark.parametrize("options", [[], ["-O"]], ids=["python", "python -O"])
def test_the_readmes_example_hands_a_prompt_over(options):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    check = "\nis_same = [job.result.num_tokens == 200]"
    check += "\nis_same += [torch.equal(p[:12], d[13:25]) for p, d in zip(p_kv, d_kv)]"
    check += "\nis_same += [torch.equal(p[12, :8], d[25, :8]) for p, d in zip(p_kv, d_kv)]"
    check += "\nraise SystemExit(not all(is_same))"  # which -O leaves in
    out = subprocess.run(
        [sys.executable, *options, "-c", code + check], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout == "JobResult(num_tokens=200, reason=None, error=None)\n"


@pytest.mark.parametrize(("page", "table_of"), TABLES)
def test_a_generated_table_is_current(page, table_of):
    is_current = table_of() in (ROOT / "docs" / page).read_text()
    assert is_current, f"docs/{page}: run python -m tests.docs.tables"


def test_each_setting_stands_with_the_reason_to_change_it():
    text = (ROOT / "docs" / "settings.md").read_text()
    reasons = text.partition("## When to change one")[2]
    variables = [variable_of(field) for field in Settings.model_fields]
    assert not [name for name in variables if not re.search(rf"{name}\b", reasons)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        assert file.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors_of(file), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_command_that_is_named_exists(document):
    text = document.read_text()
    folders = "pdstore|csrc|tests|examples|integrations|benchmarks|docs|deploy"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*\w)`", text):
        assert (ROOT / path).exists(), f"{document.name}: {path}"
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), f"{document.name}: python -m {module}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, f"{document.name}: make {target}"


def test_every_page_is_in_the_sites_navigation():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(listed)
    assert len(set(listed)) == len(listed)


def test_every_decision_that_code_names_exists():
    files = [ROOT / f for f in python_files("pdstore", "integrations", "examples", "benchmarks")]
    texts = "".join(path.read_text() for path in [*files, *native_sources()])
    assert set(re.findall(r"docs/decisions/(\S+\.md)", texts)) <= {page.name for page in DECISIONS}


def test_the_architecture_has_the_floors_in_their_order():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ?(\d*) \| ([^|]+) \|", text, flags=re.MULTILINE)
    floors: list[set[str]] = []
    for number, rooms in rows:
        floors += [set()] if number else []
        floors[-1] |= set(re.findall(r"\w+", rooms))
    assert floors == [set(rooms) for rooms in FLOORS]


def test_the_architecture_names_every_thread():
    folders = (ROOT / "pdstore", ROOT / "integrations" / "lmcache" / "pdstore_lmcache")
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in set(re.findall(r'"(pdstore-[a-z-]+)', sources)):
        assert f"`{name}" in text


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()

ALLOWED = {
    "attempt": {"csrc/arena": "one try of several to read what others write"},
    "bounce": {"pdstore/store/mooncake": "memory inside the store, which staging never is"},
}
"""Banned words that a library, or another meaning, needs in one place."""


def banned_words() -> set[str]:
    """The words in backticks behind each "not" to the end of its entry."""
    entries = re.split(r"\n(?=- |\n)", GLOSSARY.partition("\n## ")[2])
    behind = [text for entry in entries for text in re.split(r"[;:] not\s", entry)[1:]]
    return {word for text in behind for word in re.findall(r"`(\w+)`", text)}


def names_in_python(path: Path) -> Iterator[str]:
    """Every name that a module defines: classes, functions, arguments, variables, attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def names_in_cpp(path: Path) -> Iterator[str]:
    """Every identifier outside comments, strings and includes."""
    code = re.sub(r'//.*|/\*.*?\*/|"(\\.|[^"\\])*"|#include.*', " ", path.read_text())
    yield from re.findall(r"[A-Za-z_]\w*", code)


@cache
def words_of(name: str) -> str:
    """The words of a name in lower case with an underscore on both sides of each."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return "_" + "_".join(words).lower() + "_"


def sources() -> list[Path]:
    folders = ("pdstore", "examples", "integrations/lmcache/pdstore_lmcache")
    python = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    native = [p for end in ("h", "cpp", "cu") for p in (ROOT / "csrc").rglob(f"*.{end}")]
    return sorted(python + [p for p in native if "third_party" not in p.parts])


@cache
def names() -> dict[str, set[str]]:
    """The names of each source file."""
    return {
        path.relative_to(ROOT).as_posix(): set(
            (names_in_python if path.suffix == ".py" else names_in_cpp)(path)
        )
        for path in sources()
    }


def is_allowed(word: str, where: str) -> bool:
    return any(where.startswith(place) for place in ALLOWED.get(word, ()))


@pytest.mark.parametrize("word", sorted(banned_words()))
def test_no_name_contains_a_word_that_is_not_used(word):
    found = [
        f"{where}: {name}"
        for where, defined in names().items()
        if not is_allowed(word, where)
        for name in defined
        if re.search(f"_{word}s?_", words_of(name))
    ]
    assert not found


def test_the_test_reads_the_glossary_and_sees_words_in_names():
    assert {"stripe", "attempt", "carrier", "cfg", "helper"} <= banned_words()
    assert words_of("StripedLoad") == "_striped_load_"
    assert words_of("_num_KVStripes2") == "_num_kv_stripes_2_"
    assert "KVPool" in names_in_python(ROOT / "pdstore" / "worker" / "pool.py")
    assert "pds_submit" in names_in_cpp(ROOT / "csrc" / "pdstore.h")
