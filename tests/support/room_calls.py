"""Room calls: which calls a save and a load make between the rooms of pdstore/worker.

A room is a module of pdstore/worker, or a folder in it. Its floor is one above the highest room
that it imports. A call is upward if it goes from a lower floor to a higher one: a callback, or a
method of a subclass. What lies between two rooms on the stack (contextlib, threads.py, the store)
is passed over, so that no call hides behind it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NamedTuple

from pdstore.errors import JobResult
from pdstore.format.handoff import HandoffId
from pdstore.store import open_store
from tests.support.kv import Instance, settings_of

ROOT = Path(__file__).parent.parent.parent
STORES = {
    "file": "file://{path}/values",
    "shm": "shm://calls?size=64MiB&dir={path}",
    "memory": "memory://calls",
}
NUM_TOKENS = 200
JOBS = ("save", "save for a hand-off", "load")
WORKER = "pdstore.worker."
_FOLDER = f"{ROOT}/pdstore/worker/"


class RoomCall(NamedTuple):
    """A call from one room to another; `function` is what is called."""

    caller: str
    callee: str
    function: str

    def __str__(self) -> str:
        return f"{self.caller} -> {self.callee}.{self.function}"


def room_of_file(path: str) -> str | None:
    """The room of a source file; None if it is not in pdstore/worker."""
    if not path.startswith(_FOLDER):
        return None
    return path.removeprefix(_FOLDER).partition("/")[0].removesuffix(".py")


def room_of_module(module: str) -> str | None:
    return module.removeprefix(WORKER).partition(".")[0] if module.startswith(WORKER) else None


def floors_of(imports: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Returns each room's floor, from what each module imports (`house.imports`)."""
    below: dict[str, set[str]] = defaultdict(set)
    for module, others in imports.items():
        room = room_of_module(module)
        if room is not None:
            below[room] |= {under for each in others if (under := room_of_module(each))} - {room}

    @cache
    def floor_of(room: str) -> int:
        return 1 + max(map(floor_of, below[room]), default=0)

    return {room: floor_of(room) for room in list(below)}


class WorkerCalls:
    """Counts the calls between rooms that job workers make; install it before they start."""

    def __init__(self) -> None:
        self.counts: Counter[RoomCall] = Counter()

    def __enter__(self) -> WorkerCalls:
        threading.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        threading.setprofile(None)

    def upward(self, floors: Mapping[str, int]) -> Counter[RoomCall]:
        """Returns the calls from a lower floor to a higher one."""
        up = {c: n for c, n in self.counts.items() if floors[c.caller] < floors[c.callee]}
        return Counter(up)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if not threading.current_thread().name.startswith("pdstore-worker-"):
            sys.setprofile(None)
            return
        callee = room_of_file(frame.f_code.co_filename) if event == "call" else None
        if callee is None:
            return
        caller = next(rooms_above(frame), callee)
        if caller != callee:
            self.counts[RoomCall(caller, callee, frame.f_code.co_name)] += 1


def rooms_above(frame: FrameType) -> Iterator[str]:
    """Yields the rooms of a frame's callers, the nearest first."""
    above = frame.f_back
    while above is not None:
        room = room_of_file(above.f_code.co_filename)
        if room is not None:
            yield room
        above = above.f_back


def calls_of_a_job(job: str, url: str) -> WorkerCalls:
    """Saves or loads a prompt in one share; returns the calls of the worker that did it."""
    calls = WorkerCalls()
    store = open_store(url, settings_of())
    p = Instance(store)
    try:
        keys, block_ids = p.cache.keys(range(NUM_TOKENS)), range(NUM_TOKENS)
        if job == "load":
            assert_whole(p.pool.save(keys, block_ids).wait(30))
        with calls:
            d = Instance(store, workers=2)
        if job == "load":
            moving = d.pool.load(keys, block_ids)
        else:
            handoff = None if job == "save" else HandoffId("1" * 32)
            moving = d.pool.save(keys, block_ids, handoff=handoff)
        assert_whole(moving.wait(30))
        d.close()  # so that its worker has left the job
    finally:
        p.close()
        store.close()
    return calls


def assert_whole(result: JobResult) -> None:
    assert result == JobResult(NUM_TOKENS), result


def main(imports: Mapping[str, Iterable[str]]) -> None:
    floors = floors_of(imports)
    for job in JOBS:
        for name, url in STORES.items():
            with TemporaryDirectory() as path:
                Path(path, "values").mkdir()
                calls = calls_of_a_job(job, url.format(path=path))
            upward = calls.upward(floors)
            total, up = calls.counts.total(), upward.total()
            print(f"{job} over {name}: {total} calls between rooms, {up} of them upward")
            for call, number in sorted(upward.items()):
                print(f"  {number} x {call}")
