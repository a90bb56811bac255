"""The walks of block ids and tokens from the mini engine's adapter to the C interface and the hash.

`pytest -s` prints them. A test fails only if the numbers do not reach the walk's end.
"""

from __future__ import annotations

import pytest

from tests.support.mini_engine_kit import decode, hand_over, pd_of, prompt_of, until_stored
from tests.support.walk import Tracer

PROMPT = prompt_of(128)
IDS = [61, 29, 53, 47, 37, 59, 31, 43]
"""Of engine blocks, which hold 16 tokens each."""
ONE_BLOCK = list(range(200, 264))


@pytest.fixture
def open_traced(open_engine, tmp_path):
    """Opens an engine on a pool in shared memory, whose next request gets IDS."""

    def open_one(role):
        engine = open_engine(
            pd=pd_of(role, f"shm://p?size=8MiB&dir={tmp_path}", layer_ranges=1),
            max_num_batched_tokens=256,
        )
        free = engine.cache.allocate(engine.cache.num_blocks)
        engine.cache.free(IDS + [block for block in free if block not in IDS])
        return engine

    return open_one


def test_the_walk_of_a_saves_block_ids(open_traced):
    tracer = Tracer(IDS)
    with tracer.hooked():
        p = open_traced("prefill")
        with tracer.tracing():
            hand_over(p, PROMPT)
            until_stored(p)
    print(tracer.walk_to("pds_arena_fill"))


def test_the_walk_of_a_loads_block_ids(open_traced):
    params = hand_over(open_traced("prefill"), PROMPT)
    tracer = Tracer(IDS)
    with tracer.hooked():
        d = open_traced("decode")
        with tracer.tracing():
            decode(d, PROMPT, params)
    print(tracer.walk_to("pds_arena_take"))


def test_the_walk_from_tokens_to_a_key(open_traced):
    tracer = Tracer(ONE_BLOCK)
    with tracer.hooked():
        p = open_traced("prefill")
        with tracer.tracing():
            hand_over(p, ONE_BLOCK)
    print(tracer.walk_to("sha256"))
