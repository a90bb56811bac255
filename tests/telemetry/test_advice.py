"""Advice: each reason says what it means and what to look at."""

from __future__ import annotations

from pdstore.outcome import Reason
from pdstore.telemetry.advice import ADVICE


def test_every_reason_has_words_in_the_order_of_the_enumeration():
    assert list(ADVICE) == list(Reason)
    assert all(advice.means and advice.look_at for advice in ADVICE.values())
