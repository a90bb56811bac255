"""PDSTORE_ON_MISS=fail: a hand-off that falls short ends its request, and nothing else does."""

from __future__ import annotations

import pytest

from examples.mini_engine.request import Finish
from pdstore import HandoffId, open_store, read_settings
from tests.examples.test_mini_adapter import flip_a_bit, stored
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


def test_a_hand_off_that_is_whole_is_answered(open_instance, checkpoints):
    p, d = open_instance("prefill", pd=STRICT), open_instance("decode", pd=STRICT)
    asked = decode(d, prompt_of(150), hand_over(p, prompt_of(150)))
    assert_same(asked, *expect(checkpoints["llama"], prompt_of(150)))


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


def test_a_damaged_block_ends_the_request(open_instance, url):
    p, d = open_instance("prefill"), open_instance("decode", pd=STRICT)
    params = saved(p, prompt_of(150))
    flip_a_bit(url, stored(p, prompt_of(150))[1:2])
    assert decode(d, prompt_of(150), params).finish == failed("corrupt")


def test_a_marker_that_is_late_ends_the_request(open_instance):
    d = open_instance("decode", wait_s=0.05, pd=STRICT)
    params = {"pdstore": {"attempt": HandoffId.new().hex}}
    assert decode(d, prompt_of(40), params).finish == failed("handoff_late")


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
