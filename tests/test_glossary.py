"""Names use the words of docs/glossary.md, and none that it says are not used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ALLOWED = {
    "attempt": {"csrc/arena": "one try of several to read what others write"},
    "backend": {"pdstore/adapters/vllm/describe.py": "vLLM's attention backends"},
    "bounce": {"pdstore/store/mooncake": "memory inside the store, which staging never is"},
    "connector": {
        "pdstore/adapters/vllm": "vLLM's word",
        "examples/demo": "of vLLM",
        "examples/vllm": "of vLLM",
    },
    "fetch": {"csrc": "std::atomic's fetch_add and fetch_sub"},
    "idx": {"csrc": "CUDA's threadIdx and blockIdx", "pdstore/adapters/vllm": "vLLM's engine_idx"},
    "object": {"integrations/lmcache": "LMCache's ObjectKey and object groups"},
    "req": {"pdstore/adapters/vllm": "vLLM's finished_req_ids"},
}
"""Banned words that a library, or another meaning, needs in one place."""


def banned_words() -> set[str]:
    """The words in backticks behind each "not" to the end of its entry."""
    entries = re.split(r"\n(?=- |\n)", GLOSSARY.partition("\n## ")[2])
    behind = [text for entry in entries for text in re.split("[;:] not ", entry)[1:]]
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
    assert {"stripe", "attempt", "backend", "cfg", "helper"} <= banned_words()
    assert words_of("StripedLoad") == "_striped_load_"
    assert words_of("_num_KVStripes2") == "_num_kv_stripes_2_"
    assert "KVPool" in names_in_python(ROOT / "pdstore" / "worker" / "pool.py")
    assert "pds_submit" in names_in_cpp(ROOT / "csrc" / "pdstore.h")
