"""find: the leading blocks of a prompt that a store has and an engine can continue from."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.namespace import Part
from pdstore.outcome import Reason, reason_of
from pdstore.scheduler.lookup import Match
from pdstore.store.base import Store
from pdstore.store.checked import count_of

_MOST_GAPS = 8
_SHORT = 8
"""Blocks of a prompt that is asked for as a whole at once."""


def find(store: Store, keys: PromptKeys, because: Reason | None = None) -> Match:
    """Returns how much of the prompt the store has; an error of the store is a miss.

    because: the known reason why the prompt may be incomplete.
    """
    try:
        num_blocks = num_usable(store, keys)
    except StoreError as error:
        return Match.miss(keys, reason_of(error), error.with_traceback(None))
    num_tokens = keys.end_of(num_blocks)
    if num_tokens == keys.num_tokens:
        return Match(keys, num_tokens, None)
    return Match(keys.prefix(num_tokens), num_tokens, because or Reason.ABSENT)


def num_usable(store: Store, keys: PromptKeys) -> int:
    """Returns how many leading blocks can be loaded and computed on from. Raises StoreError.

    A KV group with a sliding window needs only the blocks that the next token sees: those in the
    window before the end. A gap in them makes the prompt end before the gap.
    """
    parts, windows = keys.namespace.parts, keys.namespace.windows
    if not windows:
        # most prompts are new to the pool, and to name all of a long one takes a while
        if len(keys) > _SHORT and not _has_first_block(store, keys):
            return 0
        return _match(store, keys.store_keys(parts)) // len(parts)
    whole = [part for part in parts if part.group not in windows]
    count = _match(store, keys.store_keys(whole)) // len(whole) if whole else len(keys)
    for _ in range(_MOST_GAPS):
        gap = _last_gap(store, keys.prefix(keys.end_of(count)))
        if gap is None:
            return count
        count = gap
    return _match(store, keys.prefix(keys.end_of(count)).store_keys(parts)) // len(parts)


def _match(store: Store, keys: Sequence[BlockKey]) -> int:
    return count_of(store.match(keys), keys, store)


def _has_first_block(store: Store, keys: PromptKeys) -> bool:
    first = keys.prefix(keys.end_of(1)).store_keys(keys.namespace.parts)
    return _match(store, first) == len(first)


def _last_gap(store: Store, keys: PromptKeys) -> int | None:
    """Returns the last block in the windows before the end of `keys` that is not stored whole."""
    windows = keys.namespace.windows
    wanted = [
        (number, key)
        for part in keys.namespace.parts
        if part.group in windows
        for number, key in _window_of(keys, part, windows[part.group])
    ]
    wanted.sort(key=lambda pair: -pair[0])
    found = _match(store, [key for _, key in wanted])
    return None if found == len(wanted) else wanted[found][0]


def _window_of(keys: PromptKeys, part: Part, window: int) -> list[tuple[int, BlockKey]]:
    """Returns the numbers and keys of the blocks that hold the last `window` tokens."""
    first = max(0, keys.num_tokens - window) // keys.block_tokens
    return list(enumerate(keys.store_keys([part], first), first))
