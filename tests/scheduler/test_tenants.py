"""Tenants with different salts: neither finds, names nor slows down what the other has."""

from __future__ import annotations

import contextlib

from pdstore.store.memory import MemoryStore
from tests.support.kv import Instance
from tests.support.pool_kit import save

TOKENS = list(range(300))


class Listening(MemoryStore):
    """Keeps the calls that look for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def match(self, keys):
        self.asked.append(list(keys))
        return super().match(keys)


def test_no_key_of_one_tenant_is_a_key_of_another():
    store = MemoryStore()
    tenants = [Instance(store, salt=salt) for salt in (None, "a", "b")]
    names = [set(one.cache.keys(TOKENS).store_keys(one.layout.parts)) for one in tenants]
    assert len(set.union(*names)) == sum(map(len, names))
    for one in tenants:
        one.close()


def calls_of_a_lookup(other_has: list[int]) -> list[int]:
    """Returns the number of keys of each call of a lookup, while another has saved a prompt."""
    store = Listening()
    with (
        contextlib.closing(Instance(store, salt="theirs")) as other,
        contextlib.closing(Instance(store, salt="ours")) as ours,
    ):
        if other_has:
            save(other, other_has)
        store.asked.clear()
        keys = ours.cache.keys(TOKENS)
        assert ours.cache.match(keys).num_tokens == 0
        mine = set(keys.store_keys(ours.layout.parts))
        assert all(mine.issuperset(asked) for asked in store.asked)
        return [len(asked) for asked in store.asked]


def test_a_tenants_lookups_do_not_depend_on_what_another_has_stored():
    assert calls_of_a_lookup(TOKENS) == calls_of_a_lookup([]) == calls_of_a_lookup(TOKENS[:70])
