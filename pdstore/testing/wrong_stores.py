"""Stores that break the contract, one way each; `StoreTests` must fail every one of them.

A suite that lets one of these pass is not finished.
"""

from __future__ import annotations

from pdstore.testing import wrong_batches, wrong_clears, wrong_ends, wrong_values
from pdstore.testing.wrong_store import WrongStore

ALL: tuple[type[WrongStore], ...] = tuple(
    thing
    for module in (wrong_values, wrong_batches, wrong_clears, wrong_ends)
    for thing in vars(module).values()
    if isinstance(thing, type) and issubclass(thing, WrongStore) and thing.caught_by
)
