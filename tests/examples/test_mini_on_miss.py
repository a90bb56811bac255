"""PDSTORE_ON_MISS=fail: a hand-off that falls short ends its request, and nothing else does."""

from __future__ import annotations

import pytest

from examples.mini_engine.request import Finish
from pdstore import open_store, read_settings
from tests.examples.test_mini_adapter import stored
from tests.support.mini_engine_kit import (
    ask,
    assert_same,
    decode,
    expect,
    hand_over,
    prompt_of,
    until,
    until_stored,
)

STRICT = {"on_miss": "fail"}


def failed(reason):
    return Finish("error", f"the hand-off fell short: {reason}", reason)


def saved(p, prompt):
    """Hands a prompt over; returns when all of it is stored."""
    params = hand_over(p, prompt)
    until_stored(p)
    return params


def test_a_lost_block_ends_the_request_and_gives_its_blocks_back(open_instance, checkpoints, url):
    p, d = open_instance("prefill"), open_instance("decode", pd=STRICT)
    params = saved(p, prompt_of(150))
    store = open_store(url, read_settings(store=url))
    store.remove(stored(p, prompt_of(150)).keys[1:2])
    store.close()
    assert decode(d, prompt_of(150), params).finish == failed("absent")
    until(lambda: d.cache.num_free == d.cache.num_blocks)
    other = decode(d, prompt_of(100), saved(p, prompt_of(100)))
    assert_same(other, *expect(checkpoints["llama"], prompt_of(100)))


@pytest.mark.parametrize("role", ["both", "prefill"])
def test_a_prompt_that_nobody_handed_over_is_computed(open_instance, checkpoints, role):
    engine = open_instance(role, pd=STRICT)
    asked = ask(engine, prompt_of(100)).wait()
    assert_same(asked, *expect(checkpoints["llama"], prompt_of(100)))


def test_a_bug_in_the_pool_ends_the_request(open_instance, monkeypatch):
    p, d = open_instance("prefill"), open_instance("decode", pd=STRICT)
    params = saved(p, prompt_of(100))
    monkeypatch.setattr(d.adapter, "pool", None)
    assert decode(d, prompt_of(100), params).finish == failed("fault")
    monkeypatch.undo()
