"""The map of DESIGN.md as a test: imports go up the list, and each outside thing has one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pdstore

PACKAGE = Path(pdstore.__file__).parent
ORDER = (
    *("errors", "settings", "types", "keys", "layout", "block", "weights"),
    *(
        "workers",
        "async_runner",
        "native",
        "swap",
        "staging",
        "metrics",
        "values",
        "handoff",
        "job",
    ),
    *("store.url", "store.base", "store.memory", "store.file", "store.redis", "store.mooncake"),
    *("store.wrappers", "store", "store.connect"),
    *("transfer", "mover", "striped", "lookup", "matching", "prefix_cache", "pool", "adapters"),
    *("testing", "cli"),
)
VLLM_FILES = ("plugin", "messages", "describe", "connector", "stats")
DOORS = {
    "os.environ": ["settings"],
    "threading.Thread": ["workers"],
    "concurrent": ["workers"],
    "multiprocessing": [],
    "ctypes": ["native", "native_abi", "store.mooncake_memory"],
    "redis": ["store.redis"],
    "mooncake": ["store.mooncake_library"],
    "vllm": [f"adapters.vllm.{name}" for name in VLLM_FILES],
    "pickle": [],
    "marshal": [],
    "torch.load": [],
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    name_of(path): ast.parse(path.read_text())
    for path in PACKAGE.rglob("*.py")
    if path not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
}


def place_of(module: str) -> int:
    """Its place in the order: its own, or that of the longest listed name that it is under."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in ORDER and (end == len(parts) or name != "store"):
            return ORDER.index(name)
        for prefix in ORDER:
            if name.startswith(prefix + "_"):
                return ORDER.index(prefix)
    raise AssertionError(f"{module} has no place in the order")


def imports_of(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_modules_listed_above_it(module):
    for name in imports_of(MODULES[module]):
        target = name.removeprefix("pdstore.")
        if target != name and target in MODULES and target != module:
            if target.split(".")[0] == module.split(".")[0] in ("testing", "cli", "adapters"):
                continue
            assert place_of(target) <= place_of(module), f"{module} imports {target}"


def uses_of(tree: ast.AST) -> set[str]:
    """Imported modules, and attributes of names: `os.environ`."""
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return attributes | imports_of(tree)


@pytest.mark.parametrize("thing", DOORS)
def test_each_outside_thing_has_one_door(thing):
    users = {
        module
        for module, tree in MODULES.items()
        if any(use == thing or use.startswith(thing + ".") for use in uses_of(tree))
    }
    assert {m for m in users if m.split(".")[0] != "testing"} <= set(DOORS[thing])


def test_broad_excepts_stand_at_the_border_only():
    broad = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
    }
    assert {m for m in broad if m.split(".")[0] != "testing"} <= {
        "workers",
        "adapters.vllm.plugin",
        "adapters.vllm.connector",
    }


def test_what_is_exported_is_sorted_and_there():
    assert pdstore.__all__ == sorted(pdstore.__all__)
    assert all(hasattr(pdstore, name) for name in pdstore.__all__)
    public = {
        name
        for name, value in vars(pdstore).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("pdstore")
    }
    assert public == set(pdstore.__all__)


def test_every_setting_stands_in_the_readme():
    from pdstore.cli.settings_table import settings_table

    readme = (PACKAGE.parent / "README.md").read_text()
    assert settings_table() in readme
