"""check_values_fit: refuses a layout whose values are too long for a store."""

from __future__ import annotations

from pdstore.errors import ConfigError
from pdstore.format.block import HEADER_BYTES
from pdstore.format.layout import Layout
from pdstore.store.base import Store
from pdstore.store.wrappers import WrapperStore


def check_values_fit(store: Store, layout: Layout) -> None:
    """Raises ConfigError, with what to set, if the store can never take a whole block of these."""
    num_bytes = HEADER_BYTES + layout.largest_payload_bytes + _added_bytes(store)
    why = store.why_too_long(num_bytes)
    if why is not None:
        raise ConfigError(
            f"{why}; or store blocks of less than {layout.block_tokens} tokens"
            " (PDSTORE_BLOCK_TOKENS, the same for P and D)"
        )


def _added_bytes(store: Store) -> int:
    added = 0
    while isinstance(store, WrapperStore):
        added, store = added + store.added_bytes, store.wrapped
    return added
