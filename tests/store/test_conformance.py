"""The conformance suite fails every wrong store that we can think of, and passes a right one."""

from __future__ import annotations

import threading

import pytest

from pdstore.testing import StoreTests
from tests.support import wrong_stores
from tests.support.kv import eventually

pytest_plugins = ["pytester"]

TRIES = 4  # a test of a race may miss the moment

SUITES = """
import pytest
from pdstore.testing import StoreTests
from tests.support import wrong_stores

def suite_of(wrong):
    class Suite(StoreTests):
        deadline_s = 0.2  # all of these must fail, and most do not hang

        @pytest.fixture
        def store(self):
            return wrong()

        @pytest.fixture
        def small_store(self):
            return wrong()

    return Suite

for wrong in wrong_stores.ALL:
    globals()[f"Test{wrong.__name__}"] = suite_of(wrong)
"""


@pytest.fixture(scope="module")
def expected():
    """(class, test) for each test that must fail."""
    return {(wrong.__name__, test) for wrong in wrong_stores.ALL for test in wrong.caught_by}


def test_every_wrong_store_names_tests_that_there_are(expected):
    assert len(wrong_stores.ALL) > 35
    assert {test for _, test in expected} <= set(dir(StoreTests))


def test_the_suite_fails_every_wrong_store(pytester, expected):
    file = pytester.makepyfile(test_wrong=SUITES)
    failed: dict[tuple[str, str], str] = {}
    before = set(threading.enumerate())
    for _ in range(TRIES):
        missing = sorted(expected - set(failed))
        nodes = [f"{file}::Test{wrong}::{test}" for wrong, test in missing]
        run = pytester.inline_run("-p", "no:cacheprovider", "-q", "--tb=short", *nodes)
        for report in run.getreports("pytest_runtest_logreport"):
            if report.when == "call" and report.failed:
                _, wrong, test = report.nodeid.partition("[")[0].split("::")
                failed[wrong.removeprefix("Test"), test] = report.longrepr.reprcrash.message
        if set(failed) == expected:
            break
    assert set(failed) == expected
    slips = ("TypeError", "NameError", "AttributeError", "KeyError", "IndexError: list")
    assert [m for m in failed.values() if m.startswith(slips)] == [], "failed by mistake"
    eventually(lambda: set(threading.enumerate()) <= before, 30)  # no store keeps a core busy
