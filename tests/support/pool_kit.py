"""P saves and D loads: what tests of the pool have in common."""

from __future__ import annotations

import torch

from tests.support.kv import POISON

P_BLOCKS, D_BLOCKS = list(range(20, 40)), list(range(3, 23))[::-1]


def save(p, tokens, **more):
    keys = p.cache.keys(tokens)
    return p.pool.save(keys, P_BLOCKS, **more).wait(10)


def load(d, tokens, **more):
    found = d.cache.match(d.cache.keys(tokens))
    return d.pool.load(found.keys, D_BLOCKS, **more).wait(10)


def assert_loaded(p, d, num_tokens, first_token=0):
    """Asserts that D has P's KV in [first_token, num_tokens) and its poison everywhere else."""
    for layer in range(len(p.caches)):
        got, want = d.tokens(D_BLOCKS, layer), p.tokens(P_BLOCKS, layer)
        assert torch.equal(got[first_token:num_tokens], want[first_token:num_tokens])
        assert (got[:first_token] == POISON).all()
        assert (got[num_tokens:] == POISON).all()
        others = [i for i in range(len(d.caches[layer])) if i not in D_BLOCKS]
        assert (d.caches[layer][others] == POISON).all()
