"""Checks of the counts that stores answer with, before anything relies on them.

A count decides which slots are verified and scattered, so an impossible one is an error of the
store and never a number to work with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeGuard

from pdstore.errors import BadValue, StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store


def count_of(answer: object, keys: Sequence[object], store: Store) -> int:
    """Returns a store's answer about `keys`, or their values, if it is an int in 0..len(keys).

    Raises StoreError for any other answer.
    """
    if is_count(answer, len(keys)):
        return answer
    first = keys[0] if keys else "no key"
    raise StoreError(f"{store.label}: answered {answer!r} about {len(keys)} keys from {first} on")


def num_done_of(error: StoreError, keys: Sequence[BlockKey]) -> int:
    """Returns how many of the first `keys` were served before `error`; 0 if it claims too many.

    At least one key is left behind a BadValue: the one that it is about.
    """
    most = len(keys) - isinstance(error, BadValue)
    return error.num_done if is_count(error.num_done, most) else 0


def stored_among(answers: object, keys: Sequence[BlockKey], store: Store) -> set[BlockKey]:
    """Returns the keys that a store says are stored; `answers` has a bool for each of them.

    Raises StoreError for anything else.
    """
    if not isinstance(answers, Sequence) or len(answers) != len(keys):
        raise StoreError(f"{store.label}: did not answer about each of {len(keys)} keys")
    if not set(map(type, answers)) <= {bool}:
        raise StoreError(
            f"{store.label}: answered about {len(keys)} keys with more than yes and no"
        )
    return set(itertools.compress(keys, answers))


def is_count(answer: object, most: int) -> TypeGuard[int]:
    """True if `answer` is an int in 0..most; a bool is none."""
    return isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer <= most
