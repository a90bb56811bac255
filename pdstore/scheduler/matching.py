"""How much of a prompt a store has that an engine can go on from."""

from __future__ import annotations

from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.namespace import Part
from pdstore.store.base import Store

_MOST_GAPS = 8


def num_usable(store: Store, keys: PromptKeys) -> int:
    """How many leading blocks can be loaded and computed on from. May raise StoreError.

    Of a KV group with a sliding window only the blocks count that the next token sees: those of
    the window before the end. A gap in them makes the prompt end before the gap.
    """
    parts, windows = keys.namespace.parts, keys.namespace.windows
    if not windows:
        return store.match(keys.store_keys(parts)) // len(parts)
    whole = [part for part in parts if part.group not in windows]
    count = store.match(keys.store_keys(whole)) // len(whole) if whole else len(keys)
    for _ in range(_MOST_GAPS):
        gap = _last_gap(store, keys.prefix(keys.end_of(count)))
        if gap is None:
            return count
        count = gap
    return store.match(keys.prefix(keys.end_of(count)).store_keys(parts)) // len(parts)


def _last_gap(store: Store, keys: PromptKeys) -> int | None:
    """The last block in the windows before the end of `keys` that is not there whole."""
    windows = keys.namespace.windows
    wanted = [
        (number, key)
        for part in keys.namespace.parts
        if part.group in windows
        for number, key in _window_of(keys, part, windows[part.group])
    ]
    wanted.sort(key=lambda pair: -pair[0])
    found = store.match([key for _, key in wanted])
    return None if found == len(wanted) else wanted[found][0]


def _window_of(keys: PromptKeys, part: Part, window: int) -> list[tuple[int, BlockKey]]:
    """The blocks, with their keys, that hold the last `window` tokens."""
    first = max(0, keys.num_tokens - window) // keys.block_tokens
    return list(enumerate(keys.store_keys([part], first), first))
