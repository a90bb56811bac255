"""Processes that use an arena until they are killed: `python -m tests.store.arena.actors`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pdstore.errors import StoreFull
from pdstore.format.keys import BlockKey
from pdstore.native.library import load_library
from pdstore.store.arena.store import ArenaStore
from pdstore.testing.values import content, get, put
from tests.support.kv import settings_of

KEYS = [BlockKey(f"pds1:{7:032x}:0:0:{i:032x}") for i in range(48)]
KEYS += [BlockKey(f"pds1:{7:032x}:0:0:{i:032x}:partial:3") for i in range(8)]
NAMESPACE = f"{7:032x}"
SIZES = (100, 4096, 20_000, 70_000)
WRONG = 3
"""Exit status of a process that read a wrong byte."""

SIZE_OF = {key: SIZES[i % len(SIZES)] for i, key in enumerate(KEYS)}
VALUE_OF = {key: content(key, SIZE_OF[key]) for key in KEYS}


def open_store(directory: Path, **options: float) -> ArenaStore:
    library = load_library(settings_of(native="require"), for_gpu=False)
    return ArenaStore(
        library,
        directory=directory,
        size=2 << 20,
        slab_bytes=256 << 10,
        **{"lease_s": 0.001, "fresh_s": 0.0, "orphan_timeout_s": 0.01, **options},
    )


def read(store: ArenaStore, keys: list[BlockKey]) -> None:
    sizes = [SIZE_OF[key] for key in keys]
    for key, value in zip(keys, get(store, keys, sizes), strict=False):
        if value != VALUE_OF[key]:
            os._exit(WRONG)


def write(store: ArenaStore, keys: list[BlockKey]) -> None:
    with contextlib.suppress(StoreFull):
        put(store, keys, [VALUE_OF[key] for key in keys])


def forget(store: ArenaStore, keys: list[BlockKey]) -> None:
    store.remove(keys)


def clear(store: ArenaStore, keys: list[BlockKey]) -> None:
    if len(keys) == 1:
        store.clear(NAMESPACE)


ACTIONS = (read, read, write, write, write, forget, clear)


def act(store: ArenaStore, order: random.Random) -> None:
    """Does one random thing. Ends the process where it reads a wrong byte."""
    order.choice(ACTIONS)(store, order.sample(KEYS, order.randint(1, 12)))


def act_for_ever(directory: Path, seed: int) -> None:
    store, order = open_store(directory), random.Random(seed)
    while True:
        act(store, order)


def open_large(directory: Path, **options: float) -> ArenaStore:
    """Opens an arena of one slab with 16,384 slots: to count them takes a millisecond."""
    library = load_library(settings_of(native="require"), for_gpu=False)
    return ArenaStore(
        library, "large", directory=directory, size=64 << 20, slab_bytes=64 << 20, **options
    )


def count_for_ever(directory: Path) -> None:
    """Holds the lock nearly all the time, and says by a change that it goes on."""
    store = open_large(directory)
    write(store, KEYS[:1])
    while True:
        store.counts()
        store.remove(KEYS[4:5])
        write(store, KEYS[4:5])


def in_child(body: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(1)
    return child


def kill_writers(directory: Path, times: int, seed: int) -> None:
    """Kills that many processes that use the arena, two at a time, each at a random moment."""
    order, alive = random.Random(seed), []
    load_library(settings_of(native="require"), for_gpu=False)  # once, not in every child
    for n in range(times):
        number = order.randrange(1 << 30)
        alive.append(in_child(lambda number=number: act_for_ever(directory, number)))
        if n == 0:
            continue
        time.sleep(order.uniform(0.0, 0.012))  # not to wait for something: the moment is the test
        end(alive.pop(0))
    for child in alive:
        end(child)
    print("done", flush=True)


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        print(f"a process ended with {status}", flush=True)
        os._exit(1)


if __name__ == "__main__":
    verb, directory, *numbers = sys.argv[1:]
    globals()[verb](Path(directory), *map(int, numbers))
