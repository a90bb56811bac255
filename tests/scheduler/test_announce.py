"""The facts that P's answer tells D beside the name of a handoff."""

from __future__ import annotations

from pdstore.outcome import Reason
from tests.support.kv import eventually

BLOCKS = list(range(20))


def test_an_answer_says_how_the_last_save_ended(instance):
    p = instance()

    def said(*reasons):
        p.cache.note_saves(reasons)
        handoff, params = p.cache.announce(p.cache.keys(range(9)))
        assert handoff.is_doubtful == ("last_save" in params["pdstore"])
        return params["pdstore"].get("last_save")

    assert said() is None
    assert said(None, Reason.STORE_FULL) == "store_full"
    assert said(Reason.CANCELLED, Reason.CLOSED) == "store_full", "that says nothing of the store"
    assert said(None) is None


def test_a_handoff_after_a_save_that_fell_short_is_followed_once_p_has_begun_it(instance):
    p, d = (instance(layer_ranges=3, range_bytes=1, handoff_wait_s=30.0) for _ in "pd")
    eventually(lambda: p.cache.pool_id and d.cache.pool_id)
    p.cache.note_saves([Reason.STORE_FULL])
    keys = p.cache.keys(range(100))
    handoff, params = p.cache.announce(keys)
    given_up = d.cache.follow(d.cache.keys(range(100)), params).wait(10)
    assert (given_up.num_tokens, given_up.reason) == (0, Reason.HANDOFF_FAILED)
    save = p.pool.begin_save(keys, BLOCKS, handoff=handoff)
    save.layers_done(1)
    eventually(lambda: p.store.match([handoff.started(p.namespace)]) == 1)
    following = d.cache.follow(d.cache.keys(range(100)), params)
    assert following.wait(10).follow.hex == handoff.hex
    waiting = d.cache.lookup(d.cache.keys(range(100)), params)
    save.layers_done(len(p.layout.held_layers))
    assert waiting.wait(10).num_tokens == 100
