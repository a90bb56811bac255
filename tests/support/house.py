"""Counts of the package and what stands beside it: `python -m tests.support.house` prints them.

With `--calls` it prints which calls a save and a load make between the rooms of pdstore/worker, and
how many of them go upward.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
READ_WITH_OTHERS = 60
"""A module of fewer lines is read with its neighbours, and should stand with them."""
BESIDE = ("benchmarks", "examples", "integrations/lmcache/pdstore_lmcache")
TESTS = ("tests", "integrations/lmcache/tests")
ENTRIES = ("__init__", "__main__", "main")
"""Modules that only lead to others, and may be short."""
USUAL_METHODS = {"close", "add", "get", "put", "load", "save", "clear"}
"""Names that say the same wherever they stand. Any other has at most three classes."""
MAX_CLASSES_OF_A_METHOD = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
Class = tuple[str, str]
"""The file and the name of a class."""


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


def lines_of(files: Iterable[str]) -> int:
    return sum(len((ROOT / file).read_text().splitlines()) for file in files)


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each docstring, those behind constants and fields too."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield node.lineno, text.value.strip()


def is_own(node: ast.AST) -> bool:
    """True if a node is an attribute of `self` or `cls`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def is_packed(node: ast.AST) -> bool:
    """True for `a, b = c, d`: assignments that share a line to save one, of local names too.

    A swap is none: `a, b = b, a`, or `job, self._job = self._job, None`, which reads a target.
    """
    if not (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    return not targets & {
        ast.unparse(each)
        for each in ast.walk(node.value)
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
    }


def bases_of(node: ast.ClassDef) -> list[str]:
    """Names of a class's bases: `Store` for `base.Store[Key]`."""
    return [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]


def is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "Protocol" in bases_of(node)


@cache
def imports() -> dict[str, set[str]]:
    """Returns the modules of this repository that each one imports, at any place, for types too.

    The package's own `__init__` is left out: it is the door, and names the version.
    """
    files = {name_of(file): file for file in python_files("pdstore", *BESIDE)}
    del files["pdstore"]
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names = set(imported_by(tree_of(file), package_of(module, file)))
        nearest = {name if name in files else name.rpartition(".")[0] for name in names}
        found[module] = (nearest & set(files)) - {module}
    return found


def name_of(file: str) -> str:
    inside = file.removeprefix("integrations/lmcache/")
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str, file: str) -> str:
    return module if file.endswith("/__init__.py") else module.rpartition(".")[0]


def imported_by(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields the names that a module of a package imports: `pdstore.store.base.Store`.

    A module that calls importlib imports each module that one of its texts names, and each one
    whose function a text names: which text reaches importlib, a program cannot tell.
    """
    nodes = list(ast.walk(tree))
    has_importlib = any(is_import_by_name(node) for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, (above, node.module)))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif has_importlib and isinstance(node, ast.Constant):
            text = str(node.value)
            yield package + text if text.startswith(".") else text


def is_import_by_name(node: ast.AST) -> bool:
    """True for `importlib.import_module(...)` and `__import__(...)`, each at its usual name."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
        "import_module",
        "__import__",
    )


def modules_in_circles() -> list[str]:
    """Modules that import each other, directly or through others."""
    leads_to: dict[str, set[str]] = {}
    for module in imports():
        leads_to[module] = set()
        left = [module]
        while left:
            new = imports()[left.pop()] - leads_to[module]
            leads_to[module] |= new
            left += new
    return sorted(module for module, others in leads_to.items() if module in others)


@cache
def classes() -> dict[Class, ast.ClassDef]:
    return {
        (file, node.name): node
        for file in python_files("pdstore")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
    }


def own_bases(of: Class) -> Iterator[Class]:
    """Yields a class's bases in pdstore; one of its own file before others of that name."""
    for name in bases_of(classes()[of]):
        same = [other for other in classes() if other[1] == name]
        yield from [other for other in same if other[0] == of[0]] or same[:1]


@cache
def family_of(of: Class) -> Class:
    """The first ancestor of a class in pdstore, or itself: its relatives have the same one."""
    ancestor = next(own_bases(of), None)
    return family_of(ancestor) if ancestor else of


def methods_of(node: ast.ClassDef) -> set[str]:
    """Public methods that a class defines; a property is a noun, and does not count."""
    return {
        each.name
        for each in node.body
        if isinstance(each, Function) and not each.name.startswith("_")
        if not any("property" in ast.unparse(mark) for mark in each.decorator_list)
    }


def contract_of(of: Class, method: str) -> Class:
    """The owner of a method's meaning: a protocol of several methods, or the class's family."""
    own = methods_of(classes()[of])
    for protocol, node in classes().items():
        asked = methods_of(node)
        if is_protocol(node) and len(asked) > 1 and method in asked and asked <= own:
            return family_of(protocol)
    return family_of(of)


@cache
def overloaded_methods() -> dict[str, list[str]]:
    """Method names that more than three unrelated classes define, with these classes."""
    found: dict[str, set[Class]] = defaultdict(set)
    for of, node in classes().items():
        for method in methods_of(node) - USUAL_METHODS:
            found[method].add(contract_of(of, method))
    return {
        method: sorted(f"{name_of(file)}.{name}" for file, name in contracts)
        for method, contracts in found.items()
        if len(contracts) > MAX_CLASSES_OF_A_METHOD
    }


def files_of_folders() -> Counter[str]:
    return Counter(Path(file).parent.as_posix() for file in python_files("pdstore"))


def nightly_marks() -> int:
    return sum(
        len(re.findall(r"\bmark\.nightly\b", (ROOT / file).read_text()))
        for file in python_files(*TESTS)
    )


@cache
def counts() -> dict[str, int]:
    """Returns what `main` prints; NONE_OF of tests/test_house.py names what is always 0."""
    files = python_files("pdstore")
    nodes = [node for file in files for node in ast.walk(tree_of(file))]
    native = [path for path in native_sources() if not {"tests", "bench"} & set(path.parts)]
    modules = [file for file in files if Path(file).stem not in ENTRIES]
    return {
        "lines": lines_of(files),
        "files": len(files),
        "small modules": sum(lines_of([file]) < READ_WITH_OTHERS for file in modules),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "protocols": sum(map(is_protocol, nodes)),
        "packed assignments": sum(map(is_packed, nodes)),
        "modules in circles": len(modules_in_circles()),
        "overloaded method names": len(overloaded_methods()),
        "lines of native sources": lines_of(str(path) for path in native),
        "lines of tests": lines_of(python_files(*TESTS)),
        "nightly marks": nightly_marks(),
        "lines of benchmarks, examples and integrations": lines_of(python_files(*BESIDE)),
    }


def docstring_words_per_statement() -> float:
    words = sum(
        len(text.split())
        for file in python_files("pdstore")
        for _, text in docstrings_of(tree_of(file))
    )
    return words / counts()["statements"]


def main(arguments: Sequence[str]) -> None:
    if "--calls" in arguments:
        from tests.support import room_calls  # it imports the package, whose text is read here

        room_calls.main(imports())
        return
    for what, number in counts().items():
        print(f"{number:7,}  {what}")
    packed = 1000 * counts()["packed assignments"] / counts()["lines"]
    print(f"{packed:7.2f}  packed assignments in 1,000 lines")
    print(f"{docstring_words_per_statement():7.2f}  docstring words per statement")
    for folder, number in files_of_folders().most_common(8):
        print(f"{number:7}  files in {folder}")
    print("In circles:", *modules_in_circles())
    for method, owners in sorted(overloaded_methods().items()):
        print(f"{method}: {', '.join(owners)}")


if __name__ == "__main__":
    main(sys.argv[1:])
