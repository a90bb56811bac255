"""TaskResults: each result is fetched once, and a descriptor tells of it."""

from __future__ import annotations

from pdstore.adapters.lmcache.task_results import TaskResults


class Notifier:
    def __init__(self):
        self.calls = []

    def fileno(self):
        return 7

    def notify(self):
        self.calls.append("notify")

    def close(self):
        self.calls.append("close")


def test_a_result_is_fetched_once():
    results = TaskResults(Notifier())
    results.add(1, "one")
    assert [results.pop(2), results.pop(1), results.pop(1)] == [None, "one", None]


def test_all_results_are_fetched_once():
    results = TaskResults(Notifier())
    results.add(1, "one")
    results.add(2, "two")
    assert results.pop_all() == {1: "one", 2: "two"}
    assert results.pop_all() == {}


def test_each_result_is_told_and_none_after_the_end():
    notifier = Notifier()
    results = TaskResults(notifier)
    assert results.fileno() == 7
    results.add(1, "one")
    results.close()
    results.close()
    results.add(2, "two")
    assert notifier.calls == ["notify", "close"]
    assert results.pop(2) is None
