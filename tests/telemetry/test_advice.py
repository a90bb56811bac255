"""Advice: each reason says what it means and what to look at."""

from __future__ import annotations

from pdstore.outcome import Reason
from pdstore.telemetry.advice import ADVICE
from tests.docs.tables import advice_table


def test_every_reason_has_words_in_the_order_of_the_enumeration():
    assert list(ADVICE) == list(Reason)
    assert all(advice.means and advice.look_at for advice in ADVICE.values())


def test_the_table_has_a_row_for_every_reason():
    rows = advice_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [reason.value for reason in Reason]
    assert all(row.count("|") == 4 for row in rows)
