"""Random bytes over an arena's index or its values: fewer tokens, and never a wrong one."""

from __future__ import annotations

import mmap
import os
import random

import torch

from pdstore.errors import StoreError
from tests.support.kv import POISON, Instance

MIB = 1 << 20
PROMPT, BLOCKS = range(600), range(1, 39)


def mapped(store) -> mmap.mmap:
    """The whole file, as another process of this user could map it."""
    fd = os.open(store.path, os.O_RDWR)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def damage(file: mmap.mmap, order: random.Random, end: int) -> None:
    """Overwrites up to 16 bytes in each of some places before `end`."""
    for _ in range(order.choice((1, 4, 40))):
        at = order.randrange(64, end)
        for i in range(at, min(end, at + order.randint(1, 16))):
            file[i] = order.choice((0, 255, order.randrange(256)))


def load_of(d: Instance) -> int:
    """Loads the prompt into poisoned blocks; returns how many tokens came, all compared."""
    for cache in d.caches:
        cache.fill_(POISON)
    result = d.pool.load(d.cache.keys(PROMPT), list(BLOCKS)).wait(20)
    return result.num_tokens


def test_damage_anywhere_costs_tokens_and_never_gives_a_wrong_one(open_arena):
    store = open_arena(size=8 * MIB, slab_bytes=MIB, lock_timeout_s=0.5)
    p, d = Instance(store), Instance(open_arena(lock_timeout_s=0.5), fill=POISON)
    file, order, lost = mapped(store), random.Random(3), 0
    data_at = len(file) - 8 * MIB
    used = 200_000  # of the index: header, slabs, chains' heads, the first slots
    for turn in range(24):
        p.pool.save(p.cache.keys(PROMPT), list(BLOCKS)).wait(20)
        damage(file, order, (20_000, used, data_at, len(file))[turn % 4])
        num_tokens = load_of(d)
        for mine, theirs in zip(d.caches, p.caches, strict=True):
            ids = list(BLOCKS)
            right = mine[ids].flatten(0, 1)[:num_tokens], theirs[ids].flatten(0, 1)[:num_tokens]
            assert torch.equal(*right)
        lost += num_tokens < len(PROMPT)
        try:
            store.clear(p.namespace.hex)
        except StoreError:
            store.counts()  # it was rebuilt
    assert 0 < lost < 24
    p.close()
    d.close()
    file.close()
