"""Imports of a package whose dependencies are not installed: empty modules stand for them."""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class _Empty(abc.ABCMeta):
    """The kind of each class that stands for a thing left out; its attributes are such classes."""

    def __getattr__(cls, name: str) -> type:
        return _stand_in(name)

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __call__(cls, *arguments: object, **named: object) -> object:
        """Decorates nothing, if it is called as a decorator; makes an object otherwise."""
        is_decorator = len(arguments) == 1 and not named and callable(arguments[0])
        return arguments[0] if is_decorator else super().__call__()


def _stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Module(types.ModuleType):
    """Stands for a module that is left out."""

    def __getattr__(self, name: str) -> type:
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _Leaver(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str], given: Mapping[str, Mapping[str, object]]) -> None:
        self._packages = tuple(f"{package}." for package in packages)
        self._given = given

    def find_spec(self, name, path=None, target=None):
        if not f"{name}.".startswith(self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        vars(module).update(self._given.get(module.__name__, {}))


def leave_out(
    packages: Sequence[str], given: Mapping[str, Mapping[str, object]] | None = None
) -> None:
    """Puts empty modules in the place of some packages and of all that is in them.

    given: by a module's name, what it has nevertheless.
    """
    sys.meta_path.insert(0, _Leaver(packages, given or {}))


def find_in(wheel: Path) -> None:
    """Lets SGLang's modules be imported from a wheel, without its `__init__`, which imports all."""
    sglang = types.ModuleType("sglang")
    sglang.__path__ = [f"{wheel}/sglang"]
    sglang.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    sys.modules["sglang"] = sglang
