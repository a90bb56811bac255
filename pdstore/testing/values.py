"""Tools for tests: keys and values that any process can check; threads, forks with a deadline."""

from __future__ import annotations

import multiprocessing
import random
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence

from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, Store, count_of


def fresh_keys(count: int) -> list[BlockKey]:
    """Returns block keys that no other test uses."""
    namespace = secrets.token_hex(16)
    return [BlockKey(f"pds1:{namespace}:0:0:{i:032x}") for i in range(count)]


def content(key: str, size: int, version: int = 0) -> bytes:
    """Returns `size` pseudo-random bytes, which are fixed by `key` and `version`."""
    return random.Random(f"{key}#{version}").randbytes(size)


def contents(keys: Sequence[str], size: int, version: int = 0) -> list[bytes]:
    """Returns for each key its `content`; all values have the same size."""
    return [content(key, size, version) for key in keys]


def empty_slots(
    sizes: Sequence[int], *, slot_bytes: int | None = None, numbers: Sequence[int] | None = None
) -> Slots:
    """Returns slots in a new buffer of bytes 0xEE; their numbers are 0, 1, 2... if not given."""
    slot_bytes = max([*sizes, 1]) if slot_bytes is None else slot_bytes
    numbers = range(len(sizes)) if numbers is None else numbers
    view = memoryview(bytearray(b"\xee" * slot_bytes * (max(numbers, default=0) + 1)))
    return Slots(view, slot_bytes, numbers, sizes)


def filled_slots(
    values: Sequence[bytes], *, slot_bytes: int | None = None, numbers: Sequence[int] | None = None
) -> Slots:
    """Returns slots like those of `empty_slots`, but filled with these values."""
    sizes = [len(value) for value in values]
    slots = empty_slots(sizes, slot_bytes=slot_bytes, numbers=numbers)
    for i, value in enumerate(values):
        slots.value(i)[:] = value
    return slots


def put(store: Store, keys: Sequence[BlockKey], values: Sequence[bytes]) -> int:
    """Puts values; returns the count that the store answers, after checking that it is possible."""
    return count_of(store.put(keys, filled_slots(values)), keys, store)


def get(store: Store, keys: Sequence[BlockKey], sizes: Sequence[int]) -> list[bytes]:
    """Gets values; returns the leading ones, as many as the store says that it has read."""
    slots = empty_slots(sizes)
    n = count_of(store.get(keys, slots), keys, store)
    return [bytes(slots.value(i)) for i in range(n)]


def put_new(store: Store, count: int, size: int) -> tuple[list[BlockKey], list[bytes]]:
    """Puts values of one size under new keys; returns keys and values. The store must take all."""
    keys = fresh_keys(count)
    values = contents(keys, size)
    assert put(store, keys, values) == count
    return keys, values


def assert_stored(store: Store, keys: Sequence[BlockKey], values: Sequence[bytes]) -> None:
    """Asserts that the store returns exactly these values for these keys."""
    assert_values(get(store, keys, [len(value) for value in values]), values)


def assert_values(found: Sequence[bytes], expected: Sequence[bytes]) -> None:
    """Asserts that values are equal. The message is short, because values may have megabytes."""
    for i, (value, right) in enumerate(zip(found, expected, strict=False)):
        if value != right:
            pairs = enumerate(zip(value, right, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(value), len(right)))
            raise AssertionError(
                f"value {i} of {len(expected)} is wrong from byte {same} on:"
                f" {len(value)} bytes, {len(right)} expected"
            )
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} values, {len(expected)} expected")


def run_together(*functions: Callable[[], None], deadline_s: float = 30.0) -> None:
    """Runs functions on threads. Raises their first error; AssertionError if any runs too long."""
    start_background(*functions)(deadline_s)


def start_background(*functions: Callable[[], None]) -> Callable[[float], None]:
    """Starts functions on threads; returns a function that waits for them like `run_together`."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(f,), daemon=True)  # noqa: TID251 - no torch here
        for f in functions
    ]
    for thread in threads:
        thread.start()

    def join(deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if errors:
            raise errors[0]
        alive = sum(thread.is_alive() for thread in threads)
        assert not alive, f"{alive} of {len(threads)} still run after {deadline_s} s"

    return join


def exit_code_of(function: Callable[[], object], deadline_s: float = 10.0) -> int | None:
    """Runs a function in a forked child. Returns 0 if its result is true, None if it hangs."""
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not function()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has several threads
        child.start()
    child.join(deadline_s)
    code = child.exitcode
    child.kill()
    child.join()
    return code
