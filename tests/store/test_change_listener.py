"""ChangeListener: no change is missed, nobody is woken for nothing, errors are survived."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.store.change_listener import ChangeListener
from tests.support.kv import eventually


class Changes:
    """A store's number of changes, and who waits for it."""

    def __init__(self):
        self.changed, self.number, self.num_waits = threading.Condition(), 0, 0
        self.error: Exception | None = None

    def change(self):
        with self.changed:
            self.number += 1
            self.changed.notify_all()

    def wait_for_change(self, seen, timeout_s):
        with self.changed:
            self.num_waits += 1
            if self.error is not None:
                raise self.error
            self.changed.wait_for(lambda: seen != self.number, timeout_s)
            return self.number


@pytest.fixture
def changes():
    return Changes()


@pytest.fixture
def told():
    return []


@pytest.fixture
def listener(changes, told):
    listener = ChangeListener(changes, lambda _: told.append(changes.number), retry_s=0.01)
    yield listener
    listener.close()


def test_nobody_waits_for_changes_before_somebody_listens(changes, listener, told):
    changes.change()
    time.sleep(0.02)
    assert changes.num_waits == 0
    assert told == []


def test_what_changed_before_is_told_at_the_start_and_each_change_later(changes, listener, told):
    changes.change()
    listener.listen()
    eventually(lambda: told == [1])
    listener.listen()
    for number in (2, 3, 4):
        changes.change()
        eventually(lambda number=number: told[-1] == number)
    assert told == [1, 2, 3, 4]


def test_after_a_rest_it_waits_no_more_until_it_listens_again(changes, listener, told):
    listener.listen()
    eventually(lambda: told == [0])
    listener.rest()
    changes.change()
    time.sleep(0.02)
    num_waits = changes.num_waits
    changes.change()
    time.sleep(0.02)
    assert changes.num_waits == num_waits
    listener.listen()
    eventually(lambda: told[-1] == 2)


def test_a_store_that_errs_is_asked_again(changes, listener, told):
    changes.error = StoreUnavailable("away")
    listener.listen()
    eventually(lambda: changes.num_waits >= 2)
    changes.error = None
    eventually(lambda: told == [0])
