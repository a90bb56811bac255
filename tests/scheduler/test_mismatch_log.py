"""MismatchLog: a standing mismatch is told, and does not flood the log."""

from __future__ import annotations

from pdstore.scheduler.mismatch_log import MismatchLog


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_message_is_logged_once_in_a_while(caplog):
    mismatches = MismatchLog(silence_s=60.0, pause_s=0.0)
    for message in ("a", "b", "a", "b"):
        mismatches.warn(message)
    assert lines(caplog) == ["a", "b"]


def test_after_the_silence_it_is_logged_again(caplog):
    mismatches = MismatchLog(silence_s=0.0, pause_s=0.0)
    mismatches.warn("a")
    mismatches.warn("a")
    assert lines(caplog) == ["a", "a"]


def test_ever_other_messages_do_not_flood_the_log(caplog):
    mismatches = MismatchLog(silence_s=60.0, pause_s=60.0)
    for i in range(100):
        mismatches.warn(f"message {i}")
    assert lines(caplog) == ["message 0"]


def test_messages_are_forgotten_in_the_end(caplog):
    mismatches = MismatchLog(silence_s=60.0, pause_s=0.0)
    for i in range(65):
        mismatches.warn(f"message {i}")
    mismatches.warn("message 0")
    assert lines(caplog).count("message 0") == 2
