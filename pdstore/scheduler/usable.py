"""usable_and_shared: asks the store after how many blocks of a prompt an engine can continue."""

# Decision: docs/decisions/007-sliding-windows.md
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey, Part, PromptKeys
from pdstore.store.base import Store, count_of, num_done_of, stored_among
from pdstore.store.optional import FindsKeys

_MAX_GAPS = 8  # a lookup asks for so many ends of a prompt where windows or states may be missing
_SHORT = 8
"""Of a prompt of more blocks than this, the first block is looked up alone before the others."""


class FailedAfter(StoreError):
    """The store failed after it had told that so many leading blocks can be used."""

    def __init__(self, num_blocks: int, error: StoreError) -> None:
        super().__init__(str(error))
        self.num_blocks = num_blocks
        self.error = error


def num_usable(store: Store, keys: PromptKeys) -> int:
    """Returns after how many leading blocks an engine can continue if it loads them."""
    return usable_and_shared(store, keys)[0]


def usable_and_shared(store: Store, keys: PromptKeys) -> tuple[int, int]:
    """Returns after how many leading blocks an engine can continue if it loads them.

    Also returns how many leading blocks the pool has of the layers that need all earlier tokens, if
    other layers keep states; else 0.

    Of some KV groups, the engine does not need all earlier blocks (`Continuation.blocks`). If a
    needed one is missing, it continues where that begins. Raises StoreError.
    """
    parts, continuation = keys.namespace.parts, keys.namespace.continuation
    if continuation.needs_all:
        # the pool has nothing of most prompts, and making all keys of a long prompt takes long
        first = keys.prefix(keys.block_tokens).store_keys(parts)
        if len(keys) > _SHORT and _match(store, first) < len(first):
            return 0, 0
        return _match_whole(store, keys), 0
    whole = [part for part in parts if part.group not in continuation.needs]
    count, error = _match_blocks(store, keys, whole) if whole else (len(keys), None)
    if continuation.is_exact:
        usable = _last_with_states(store, keys, count) if count else 0
        return _unless(error, usable), count if whole else 0
    for _ in range(_MAX_GAPS):
        gap = _last_gap(store, keys.prefix(keys.end_of(count))) if count else None
        if gap is None:
            return _unless(error, count), 0
        count = gap
    return _unless(error, _match_whole(store, keys.prefix(keys.end_of(count)))), 0


def _last_with_states(store: Store, keys: PromptKeys, count: int) -> int:
    """Returns the last of the first `count` blocks after which an engine can continue; 0 if none.

    Only of KV groups that do not need all blocks.
    """
    for number in itertools.islice(_ends_with_states(store, keys, count), _MAX_GAPS):
        wanted = [*_needed_after(keys, number)]
        if _match(store, wanted) == len(wanted):
            return number
    return 0


def _ends_with_states(store: Store, keys: PromptKeys, count: int) -> Iterator[int]:
    """Yields the blocks after which an engine may be able to continue, from the last one on.

    A prompt that was handed over has its states at its end, so a prompt of which the first `count`
    blocks are all is asked for these alone. Else states are few and far apart, so one search asks
    for those after every block; the match of an end leases what an engine loads. A store that
    cannot search is asked for the last few ends, one after the other.
    """
    finder = store.optional(FindsKeys)
    if finder is None:
        yield from range(count, 0, -1)
        return
    if count == len(keys):
        yield count
    needs = keys.namespace.continuation.needs
    every = keys.store_keys([p for p in keys.namespace.parts if p.group in needs], 0, count)
    stored = stored_among(finder.which_stored(every), every, store)
    for number in range(count, 0, -1):
        if all(key in stored for key in _needed_after(keys, number)):
            yield number


def _needed_after(keys: PromptKeys, num_blocks: int) -> Iterator[BlockKey]:
    """Yields the keys that must be there after so many blocks, where not all blocks must be."""
    continuation, end = keys.namespace.continuation, keys.end_of(num_blocks)
    for part in keys.namespace.parts:
        if part.group in continuation.needs:
            blocks = continuation.blocks(part.group, end)
            yield from keys.store_keys([part], blocks.start, blocks.stop)


def _match_whole(store: Store, keys: PromptKeys) -> int:
    """Returns how many leading blocks have all of their parts. Raises FailedAfter."""
    count, error = _match_blocks(store, keys, keys.namespace.parts)
    return _unless(error, count)


def _match_blocks(
    store: Store, keys: PromptKeys, parts: Sequence[Part]
) -> tuple[int, StoreError | None]:
    """Returns how many leading blocks have these parts, and the error that ended the count."""
    wanted = keys.store_keys(parts)
    try:
        return _match(store, wanted) // len(parts), None
    except StoreError as error:
        return num_done_of(error, wanted) // len(parts), error


def _unless(error: StoreError | None, num_blocks: int) -> int:
    if error is not None:
        raise FailedAfter(num_blocks, error) from error
    return num_blocks


def _match(store: Store, keys: Sequence[BlockKey]) -> int:
    return count_of(store.match(keys), keys, store)


def _last_gap(store: Store, keys: PromptKeys) -> int | None:
    """Returns the last missing block of those needed to go on after `keys`; None if none is.

    Only of KV groups that do not need all blocks.
    """
    continuation = keys.namespace.continuation
    wanted: list[tuple[int, BlockKey]] = []
    for part in keys.namespace.parts:
        if part.group in continuation.needs:
            first = continuation.blocks(part.group, keys.num_tokens).start
            wanted += enumerate(keys.store_keys([part], first), first)
    wanted.sort(key=lambda pair: -pair[0])
    found = _match(store, [key for _, key in wanted])
    return None if found == len(wanted) else wanted[found][0]
