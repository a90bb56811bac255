"""The facts that P's answer tells D beside the name of a handoff."""

from __future__ import annotations

from pdstore.outcome import Reason


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
