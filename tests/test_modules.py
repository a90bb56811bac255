"""The map of docs/architecture.md as a test: who imports whom, and one door for each thing."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import pdstore
from pdstore import errors

PACKAGE = Path(pdstore.__file__).parent
LMCACHE = PACKAGE.parent / "integrations" / "lmcache" / "pdstore_lmcache"
"""LMCache's adapter: a distribution of its own, and a room like any for these rules."""
FLOORS = (
    ("errors",),
    ("environment",),
    ("settings", "threads", "sizing"),
    ("telemetry",),
    ("metrics", "async_runner"),
    ("format", "native"),
    ("store",),
    ("scheduler", "worker", "status"),
    ("engine",),
    ("adapters", "pdstore_lmcache", "testing", "cli", "router", "public"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
VLLM_FILES = ("plugin", "messages", "describe", "layers", "tables", "connector", "stats", "events")
DOORS = {
    "os.environ": ["environment", "settings"],
    "threading.Thread": ["threads"],
    "concurrent": ["threads"],
    "multiprocessing": [],
    "ctypes": [*(f"native.{name}" for name in ("library", "engine", "arena"))],
    "redis": [
        *(f"store.redis.{name}" for name in ("store", "connection", "cluster")),
        *("store.redis.remedies", "store.redis.server"),
        "cli.bench.raw",  # the plain client, to compare the store with
    ],
    "mooncake": ["store.mooncake.library"],
    "vllm": [f"adapters.vllm.{name}" for name in VLLM_FILES],
    "lmcache": ["pdstore_lmcache.l2_adapter"],
    "sglang": [f"adapters.sglang.{name}" for name in ("backend", "pages")],
    "pickle": [],
    "marshal": [],
    "torch.load": [],
}


def name_of(path: Path) -> str:
    folder = LMCACHE.parent if path.is_relative_to(LMCACHE) else PACKAGE
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    name_of(path): ast.parse(path.read_text())
    for folder in (PACKAGE, LMCACHE)
    for path in folder.rglob("*.py")
    if path not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
}


def room_of(module: str) -> str:
    """The file or folder of the package that a module is in."""
    return module.split(".")[0]


@cache
def imports_of(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return found


def test_every_room_has_a_floor():
    assert {room_of(module) for module in MODULES} == set(FLOOR_OF)


def test_a_module_imports_only_its_own_room_and_rooms_of_lower_floors():
    """Rooms of one floor never import each other: so scheduler and worker stay apart."""
    assert not sorted(
        f"{module} imports {name}"
        for module, tree in MODULES.items()
        for name in imports_of(tree)
        if name.startswith("pdstore") and is_above(name.removeprefix("pdstore."), module)
    )


def is_above(target: str, module: str) -> bool:
    """True if a target is in another room that does not stand on a lower floor."""
    room, other = room_of(module), room_of(target)
    return other in FLOOR_OF and other != room and FLOOR_OF[other] >= FLOOR_OF[room]


@cache
def uses_of(tree: ast.AST) -> set[str]:
    """Imported modules, and attributes of names: `os.environ`."""
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return attributes | imports_of(tree)


@pytest.mark.requirement(
    "R-DEV-2",
    "every thread that may touch a device is pinned to it",
    note="threads start in one module, which pins them",
)
@pytest.mark.requirement(
    "R-AW-3, 20",
    "builds leave the user's environment alone",
    note="only two modules read or write it",
)
def test_each_outside_thing_has_one_door():
    assert not sorted(
        f"{module} uses {thing}"
        for module, tree in MODULES.items()
        if room_of(module) != "testing"
        for thing, doors in DOORS.items()
        if module not in doors
        if any(use == thing or use.startswith(thing + ".") for use in uses_of(tree))
    )


MOVERS = ("store.", "worker.swap.", "worker.transfer.")
NAMERS = ("scheduler.", "format.keys.", "format.handoff.", "format.identity.")


def names_of(tree: ast.AST) -> set[str]:
    """The last names of imports, and the names of attributes."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {name.rpartition(".")[2] for name in imports_of(tree)}


def test_what_moves_bytes_reads_no_identity_and_what_names_keys_no_geometry():
    """So models with other caches change one of the two, and models with other names the other."""
    assert not sorted(
        f"{module} reads {name}"
        for rooms, barred in ((MOVERS, {"identity"}), (NAMERS, {"geometry", "layout"}))
        for module, tree in MODULES.items()
        if f"{module}.".startswith(rooms)
        for name in names_of(tree) & barred
    )


def test_every_door_is_there():
    assert {door for doors in DOORS.values() for door in doors} <= set(MODULES)


def imports_of_names(tree: ast.Module) -> set[str]:
    return {a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}


def test_the_public_names_catch_every_error():
    public = {name for name in pdstore.__all__ if hasattr(errors, name)} - {"PDStoreError"}
    every = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ]
    bases = tuple(vars(errors)[name] for name in public)
    assert [each for each in every if not issubclass(each, bases)] == [errors.PDStoreError]


def test_what_is_exported_is_there():
    assert all(hasattr(pdstore, name) for name in pdstore.__all__)
    assert imports_of_names(MODULES["public"]) == set(pdstore.__all__)
