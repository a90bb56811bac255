"""For tests: keys and values that any process can check; threads and forks with a deadline."""

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
    """Returns the bytes of a key's value; every part and every version differ."""
    return random.Random(f"{key}#{version}").randbytes(size)


def contents(keys: Sequence[str], size: int, version: int = 0) -> list[bytes]:
    """Returns the values of keys, all of one size."""
    return [content(key, size, version) for key in keys]


def empty_slots(
    sizes: Sequence[int], *, slot_bytes: int | None = None, numbers: Sequence[int] | None = None
) -> Slots:
    """Returns slots in a new buffer of bytes 0xEE; without `numbers`, in the buffer's order."""
    slot_bytes = max([*sizes, 1]) if slot_bytes is None else slot_bytes
    numbers = range(len(sizes)) if numbers is None else numbers
    view = memoryview(bytearray(b"\xee" * slot_bytes * (max(numbers, default=0) + 1)))
    return Slots(view, slot_bytes, numbers, sizes)


def filled_slots(
    values: Sequence[bytes], *, slot_bytes: int | None = None, numbers: Sequence[int] | None = None
) -> Slots:
    """Returns slots as `empty_slots` does, that hold these values."""
    sizes = [len(value) for value in values]
    slots = empty_slots(sizes, slot_bytes=slot_bytes, numbers=numbers)
    for i, value in enumerate(values):
        slots.value(i)[:] = value
    return slots


def put(store: Store, keys: Sequence[BlockKey], values: Sequence[bytes]) -> int:
    """Puts values; returns the store's answer, which must be a count."""
    return count_of(store.put(keys, filled_slots(values)), keys, store)


def get(store: Store, keys: Sequence[BlockKey], sizes: Sequence[int]) -> list[bytes]:
    """Gets values; returns those of the leading keys that were there."""
    slots = empty_slots(sizes)
    n = count_of(store.get(keys, slots), keys, store)
    return [bytes(slots.value(i)) for i in range(n)]


def put_new(store: Store, count: int, size: int) -> tuple[list[BlockKey], list[bytes]]:
    """Puts values of one size under new keys, which all must be taken; returns both."""
    keys = fresh_keys(count)
    values = contents(keys, size)
    assert put(store, keys, values) == count
    return keys, values


def assert_stored(store: Store, keys: Sequence[BlockKey], values: Sequence[bytes]) -> None:
    """Asserts that the store returns all of these values."""
    assert_values(get(store, keys, [len(value) for value in values]), values)


def assert_values(found: Sequence[bytes], expected: Sequence[bytes]) -> None:
    """Compares values, with a short message: a diff of megabytes helps nobody."""
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
    """Runs functions on threads; raises the first error, AssertionError if one does not end."""
    start_background(*functions)(deadline_s)


def start_background(*functions: Callable[[], None]) -> Callable[[float], None]:
    """Starts functions on threads. The result waits for their end as `run_together` does."""
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
    """Runs a function in a forked child; returns 0 if its result was true, None if it hangs."""
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not function()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads run here, as in an engine
        child.start()
    child.join(deadline_s)
    code = child.exitcode
    child.kill()
    child.join()
    return code
