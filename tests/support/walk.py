"""Walk: the functions, files, copies and names that a list of numbers passes on its way.

A profiler sees what each call gets and returns. A frame is on the walk if it gets the numbers, or
an object that holds them, or makes one, and if that reaches the call at the walk's end: the frame
stands above that call, or above the place where something came to be that such a frame gets.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent.parent
PLACES = (f"{ROOT}/pdstore/", f"{ROOT}/examples/mini_engine/adapter.py")
INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Frames that are a part of their function; newer Pythons have none for most of them."""
MAX_DEPTH = 7
MAX_ITEMS = 4096
WIDTHS = ("<i8", "<i4")


class Found(NamedTuple):
    """A list of the numbers, and how it is reached.

    names: of an argument and of the attributes behind it.
    path: the argument, and what lies between it and the list, which is the last.
    """

    names: list[str]
    path: list[object]

    @property
    def memory(self) -> object:
        """The list, or the array that it is a view of."""
        base = base_of(self.path[-1])
        return self.path[-1] if base is None else base


@dataclass
class Visit:
    """One call of a function that got or made the numbers or a holder of them."""

    code: CodeType
    caller: Visit | None
    found: list[Found]
    order: int

    @property
    def file(self) -> str:
        return self.code.co_filename.removeprefix(f"{ROOT}/")

    def __str__(self) -> str:
        name = getattr(self.code, "co_qualname", self.code.co_name)
        given = dict.fromkeys(each.names[0] for each in self.found)
        return f"{self.file}: {name}({', '.join(given)})"


@dataclass
class Walk:
    """A walk's frames in order, and the numbers' copies and the names that these go by."""

    frames: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    copies: dict[int, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def counts(self) -> dict[str, int]:
        return {what: len(getattr(self, what)) for what in ("frames", "files", "copies", "names")}

    def __str__(self) -> str:
        steps = [f"{number:3} {frame}" for number, frame in enumerate(self.frames, 1)]
        ends = [f"copies: {', '.join(self.copies.values())}", f"names: {', '.join(self.names)}"]
        return "\n".join([*steps, *ends, str(self.counts())])


class Tracer:
    """Follows numbers through calls on any thread that starts while it is `tracing`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = frozenset(numbers)
        self._visits: dict[FrameType, Visit] = {}
        self._all: list[Visit] = []
        self._makers: dict[int, tuple[object, Visit | None]] = {}  # of each object that holds them
        self._copied_from: dict[int, object] = {}
        self._old: dict[int, object] = {}
        self._is_on = False

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks this thread and those that start in here; `tracing` switches the hook on."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Follows what is made in here; of what lives before, collections alone may hold it."""
        living = (each for each in gc.get_objects() if not isinstance(each, list | dict | set))
        self._old = {id(each): each for each in living}
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def copied(self, old: object, new: object) -> None:
        """Says that an object was copied out of sight, as by another process."""
        self._copied_from[id(new)] = old

    def walk_to(self, end: str) -> Walk:
        """Returns the walk to the function whose code calls `end`."""
        todo = [visit for visit in self._all if end in visit.code.co_names]
        assert todo, f"nothing got to {end}"
        on_it: dict[int, Visit] = {}
        while todo:
            visit = todo.pop()
            if id(visit) in on_it:
                continue
            on_it[id(visit)] = visit
            held = [held for each in visit.found for held in each.path]
            todo += [maker for each in held for maker in self._makers_of(each)]
            if visit.caller is not None:
                todo.append(visit.caller)
        return self._summary(sorted(on_it.values(), key=lambda visit: visit.order))

    def _makers_of(self, held: object) -> list[Visit]:
        """Returns the visits in which an object came to be, or what it was copied from."""
        found = []
        for each in (held, base_of(held), self._copied_from.get(id(held))):
            maker = self._makers.get(id(each), (None, None))[1]
            found += [maker] if maker is not None else []
        return found

    def _summary(self, visits: Sequence[Visit]) -> Walk:
        walk, seen = Walk(), set()
        for visit in visits:
            for each in visit.found:
                walk.copies.setdefault(
                    id(each.memory), f"{visit.code.co_name}'s {'.'.join(each.names)}"
                )
                walk.names.update(name for name in each.names[-1:] if name != "return")
            if visit.code not in seen:
                seen.add(visit.code)
                walk.frames.append(str(visit))
                walk.files.add(visit.file)
        return walk

    def _see(self, frame: FrameType, event: str, value: object) -> None:
        if not self._is_on or not is_placed(frame.f_code):
            return
        if event == "call":
            self._enter(frame)
        elif event == "return":
            self._leave(frame, value)

    def _arguments(self, frame: FrameType) -> dict[str, object]:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args and **kwargs
        names = [name for name in code.co_varnames[:count] if name != ".0"]
        return {name: frame.f_locals[name] for name in names if name in frame.f_locals}

    def _enter(self, frame: FrameType) -> None:
        found = self._found_in(self._arguments(frame))
        if found:
            visit = self._visits[frame] = self._visit(frame, found)
            self._made(found, visit.caller)

    def _leave(self, frame: FrameType, value: object) -> None:
        """Keeps which objects a function has made to hold the numbers: filled, or returned."""
        visit = self._visits.pop(frame, None)
        made = {**self._arguments(frame), "return": value}
        new = self._found_in({n: v for n, v in made.items() if id(v) not in self._makers})
        if new:
            self._made(new, visit or self._visit(frame, new))

    def _visit(self, frame: FrameType, found: list[Found]) -> Visit:
        visit = Visit(frame.f_code, self._nearest(frame.f_back), found, len(self._all))
        self._all.append(visit)
        return visit

    def _made(self, found: list[Found], maker: Visit | None) -> None:
        """Keeps who made an object, or a collection and its items; not what other threads fill."""
        for each in found:
            for held in each.path:
                self._makers.setdefault(id(held), (held, maker))
                if not isinstance(held, list | tuple | dict):
                    break

    def _nearest(self, frame: FrameType | None) -> Visit | None:
        while frame is not None and frame not in self._visits:
            frame = frame.f_back
        return self._visits[frame] if frame is not None else None

    def _found_in(self, given: dict[str, object]) -> list[Found]:
        return [found for name, value in given.items() for found in self._search(value, name)]

    def _search(self, value: object, name: str) -> Iterator[Found]:
        """Yields each list of the numbers in a value of this name."""
        seen: set[int] = set()

        def search(value: object, names: list[str], path: list[object]) -> Iterator[Found]:
            if len(path) > MAX_DEPTH or id(value) in seen or id(value) in self._old:
                return
            seen.add(id(value))
            path = [*path, value]
            if self._is_list_of_them(value):
                yield Found(names, path)
                return
            for name, part in parts_of(value):
                yield from search(part, [*names, name] if name else names, path)

        return search(value, [name], [])

    def _is_list_of_them(self, value: object) -> bool:
        if isinstance(value, list | tuple) and 0 < len(value) <= MAX_ITEMS:
            return all(type(each) is int for each in value) and self._numbers <= set(value)
        if isinstance(value, bytes | bytearray | memoryview | np.ndarray) or is_array(value):
            return any(self._numbers <= set(numbers) for numbers in readings(value))
        return False


def is_placed(code: CodeType) -> bool:
    """True for a function whose frames count."""
    return code.co_filename.startswith(PLACES) and code.co_name not in INLINE


def base_of(value: object) -> object:
    """The array that an array is a view of."""
    return value.base if isinstance(value, np.ndarray) else None


def is_array(value: object) -> bool:
    return type(value).__name__ in ("array", "Tensor") or hasattr(type(value), "_length_")


def readings(value: object) -> Iterator[list[int]]:
    """Yields the integers that a buffer may hold."""
    try:
        data = bytes(memoryview(value))  # type: ignore[call-overload]
    except (TypeError, ValueError, BufferError):
        return
    for width in WIDTHS:
        if len(data) % int(width[-1]) == 0 and len(data) <= 8 * MAX_ITEMS:
            yield np.frombuffer(data, width).tolist()


def parts_of(value: object) -> list[tuple[str, object]]:
    """Returns what an object holds, by attribute; of a collection or a function, without names."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple | set | frozenset | dict):
        items = value.values() if isinstance(value, dict) else value
        return [("", each) for each in list(items)[:MAX_ITEMS]]
    if callable(value):
        return [("", each) for each in bound_by(value)]
    if type(value).__module__.partition(".")[0] in ("pdstore", "examples", "tests", "types"):
        return attributes_of(value)
    return []


def bound_by(function: object) -> Iterator[object]:
    """Yields what a partial, a method or a closure carries."""
    for name in ("func", "args", "keywords", "__self__"):
        yield getattr(function, name, None)
    yield from (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())


def attributes_of(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return list({**getattr(value, "__dict__", {}), **found}.items())
