"""Journal: a line for every request, and the last of them."""

from __future__ import annotations

import logging
from dataclasses import replace

from pdstore.telemetry.request_record import Journal
from tests.telemetry.test_request_record import RECORD


def test_each_request_is_a_line_and_the_last_ones_are_kept(caplog):
    caplog.set_level(logging.INFO)
    journal, heard = Journal(most=2), []
    journal.listen(heard.append)
    for name in "abc":
        journal.add(replace(RECORD, request_id=name))
    assert [record.request_id for record in journal.last()] == ["b", "c"]
    assert [record.request_id for record in heard] == ["a", "b", "c"]
    assert caplog.text.count("request ") == 3
