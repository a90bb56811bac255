"""Checks of a store by use: a value makes the round trip, and large ones are timed."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdstore.cli.checks.finding import Finding, bad, info, ok
from pdstore.cli.quantity import size
from pdstore.errors import StoreError, StoreFull
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.namespace import HASH_BYTES
from pdstore.store.base import Slots, Store
from pdstore.store.find import find_optional
from pdstore.store.optional import TellsRoom

_SMALL, _LARGE = 4096, 4 << 20
_NUM_LARGE, _NUM_MATCHES = 8, 21
_TOTAL = _NUM_LARGE * _LARGE
_SMALL_POOL = 100 * _TOTAL  # in a larger one it does not matter what goes
_ALIVE = "see that the server runs, and that its URL, user and password are right"
_MORE = "give the store more memory, or empty it"


class Speed(NamedTuple):
    """Measurements: seconds of a match, bytes a second; None where it could not be measured."""

    match_s: float
    put_bytes_per_s: float | None
    get_bytes_per_s: float | None


class RoundTrip:
    """One try of a store with values of its own, which it removes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.speed: Speed | None = None

    def findings(self) -> Iterator[Finding]:
        """Yields how a store fares with a small value, then with large ones. Raises no StoreError:
        the first step that fails is the last finding.
        """
        step = "connect"
        try:
            for step, is_right in self._steps():
                if not is_right():
                    yield bad(step, "a wrong result", "see what serves this URL: no store does so")
                    return
            yield ok("round trip", "put, match, get, verify and remove are right")
            step = "speed"
            yield self._want_of_room() or self._time()
        except StoreError as error:
            yield bad(step, *_said_of(error, _ALIVE))

    def _steps(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        store, (keys, slots, header) = self._store, _value(self._store, _SMALL)

        def verifies() -> bool:
            slots.view[:] = bytes(_SMALL)
            return store.get(keys, slots) == 1 and block.verify(slots.value(0), header) is None

        def forgets() -> bool:
            store.remove(keys)
            return store.match(keys) == 0

        yield "connect", lambda: store.match(keys) == 0
        yield "put of 4 KiB", lambda: store.put(keys, slots) == 1
        yield "match", lambda: store.match(keys) == 1
        yield "get and verify", verifies
        yield "remove", forgets

    def _want_of_room(self) -> Finding | None:
        """Returns why nothing large is put: it would not fit, or push others' values out."""
        teller = find_optional(self._store, TellsRoom)
        with contextlib.suppress(StoreError):  # the check of the room tells of it
            room = teller.room() if teller is not None else None
            if room is None or room.capacity_bytes is None:
                return None
            if room.capacity_bytes < _TOTAL:
                return bad("room", f"32 MiB do not fit into {size(room.capacity_bytes)}", _MORE)
            is_full = (room.used_bytes or 0) + _TOTAL > room.capacity_bytes
            if is_full and room.capacity_bytes < _SMALL_POOL:
                return info("speed", "not measured: 32 MiB would push others' values out")
        return None

    def _time(self) -> Finding:
        store = self._store
        keys = [_new_key() for _ in range(_NUM_LARGE)]
        times = sorted(_seconds(lambda: store.match(keys)) for _ in range(_NUM_MATCHES))
        match_s = times[len(times) // 2]
        slots = Slots(
            store.allocate(_NUM_LARGE * _LARGE), _LARGE, range(_NUM_LARGE), [_LARGE] * _NUM_LARGE
        )
        slots.view[:_LARGE] = secrets.token_bytes(_LARGE)
        try:
            put_s = _seconds(lambda: store.put(keys, slots))
            num_read: list[int] = []
            get_s = _seconds(lambda: num_read.append(store.get(keys, slots)))
        except StoreFull as error:
            said, remedy = _said_of(error, _MORE)
            return bad("room", f"32 MiB do not fit: {said}", remedy)
        finally:
            with contextlib.suppress(StoreError):
                store.remove(keys)
        if num_read != [_NUM_LARGE]:
            lost = _NUM_LARGE - num_read[0]
            return bad(
                "room",
                f"{lost} of {_NUM_LARGE} values of 4 MiB were lost at once",
                "give the store more memory: it evicts what was just put",
            )
        self.speed = Speed(match_s, _TOTAL / put_s, _TOTAL / get_s)
        return ok(
            "speed",
            f"match {match_s * 1e3:.2g} ms, put {_TOTAL / put_s / 1e9:.2g} GB/s,"
            f" get {_TOTAL / get_s / 1e9:.2g} GB/s (4 MiB values, one thread)",
        )


def _said_of(error: StoreError, otherwise: str) -> tuple[str, str]:
    """Returns an error's words and its remedy; `otherwise` where the cause is not known."""
    return str(error).removesuffix(f"; {error.remedy}"), error.remedy or otherwise


def _value(store: Store, size: int) -> tuple[list[BlockKey], Slots, block.Header]:
    name = secrets.token_bytes(HASH_BYTES)
    slots = Slots(store.allocate(size), size, [0], [size])
    header = block.Header(0, 0, 0, 1, 1, size - block.HEADER_BYTES, bytes(HASH_BYTES), name)
    block.seal(slots.value(0), header)
    return [BlockKey(f"pds1:doctor:{name.hex()}")], slots, header


def _new_key() -> BlockKey:
    return BlockKey(f"pds1:doctor:{secrets.token_hex(HASH_BYTES)}")


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
