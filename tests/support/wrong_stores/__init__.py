"""Stores that break the contract, one way each; `StoreTests` must fail every one of them.

A suite that lets one of these pass is not finished.
"""

from __future__ import annotations

from tests.support.wrong_stores import batches, clears, ends, listings, values
from tests.support.wrong_stores.base import WrongStore

ALL: tuple[type[WrongStore], ...] = tuple(
    thing
    for module in (values, batches, clears, ends, listings)
    for thing in vars(module).values()
    if isinstance(thing, type) and issubclass(thing, WrongStore) and thing.caught_by
)
