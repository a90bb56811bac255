"""Timeline: the last requests, cut to a number, with texts that cannot break a page."""

from __future__ import annotations

import pytest

from examples.router.timeline import Routed, Timeline


def test_only_the_last_requests_are_kept():
    timeline = Timeline(most=2)
    for number in range(5):
        timeline.add(Routed(f"r-{number}"))
    assert [one["request_id"] for one in timeline.last()] == ["r-3", "r-4"]


@pytest.mark.parametrize("params", [None, {}, {"pdstore": "x"}, {"pdstore": {"attempt": 7}}])
def test_parameters_without_an_id_are_none(params):
    routed = Routed("r")
    routed.note_handoff(params)
    assert routed.as_json()["handoff"] is None


def test_a_request_shows_its_id_its_hand_off_and_its_phases():
    routed = Routed("r\n1")
    routed.note_handoff({"pdstore": {"attempt": "ab" * 16}})
    routed.timer.begin("prefill")
    routed.timer.end("prefill")
    shown = routed.as_json()
    assert (shown["request_id"], shown["handoff"]) == ("r?1", "ab" * 16)
    assert [phase["name"] for phase in shown["phases"]] == ["prefill"]
