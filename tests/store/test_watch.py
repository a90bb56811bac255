"""KeyWatch: one search for all waiters, after each change or at intervals; errors, ends."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore.errors import StoreClosed, StoreUnavailable
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore
from pdstore.store.watch import Backoff, KeyWatch
from pdstore.store.wrappers import WrapperStore
from tests.support.clock import Clock
from tests.support.kv import eventually


class Looked(MemoryStore):
    """Keeps what was looked for; may raise for some keys, or hang."""

    def __init__(self):
        super().__init__()
        self.looks: list[list[str]] = []
        self.error: BaseException | None = None
        self.about = ""
        self.released = threading.Event()
        self.released.set()

    def which_stored(self, keys):
        self.looks.append(list(keys))
        self.released.wait(30)
        if self.error is not None and any(self.about in key for key in keys):
            raise self.error
        return super().which_stored(keys)


class Telling(Looked):
    """Says when something was put."""

    def __init__(self):
        super().__init__()
        self.changed, self.number, self.num_waits = threading.Condition(), 0, 0
        self.deaf: Exception | None = None

    def put(self, keys, slots):
        count = super().put(keys, slots)
        with self.changed:
            self.number += 1
            self.changed.notify_all()
        return count

    def wait_for_change(self, seen, timeout_s):
        with self.changed:
            self.num_waits += 1
            if self.deaf is not None:
                raise self.deaf
            self.changed.wait_for(lambda: seen != self.number, timeout_s)
            return self.number


class KeyByKey(WrapperStore):
    """Has no search for many keys; counts its matches."""

    def __init__(self):
        super().__init__(MemoryStore())
        self.num_matches = 0
        self.error: Exception | None = None

    def match(self, keys):
        self.num_matches += 1
        if self.error is not None:
            raise self.error
        return super().match(keys)


class Waits:
    """Waits for all of some keys, and keeps what it was told."""

    is_over = False

    def __init__(self, *keys, interval_s=0.01):
        self.keys, self.interval_s = list(keys), interval_s
        self.told: list[object] = []

    def wanted(self):
        return self.keys

    def on_search(self, stored, asked_at):
        self.told.append(stored & set(self.keys))
        return self.interval_s if set(self.keys) - stored else None

    def on_search_error(self, error):
        self.told.append(error)


@pytest.fixture
def watch(closed_after):
    return lambda store, **more: closed_after(KeyWatch(store, name="pdstore-watch", **more))


def put(store, *keys):
    n = len(keys)
    store.put(list(keys), Slots(memoryview(bytearray(8)), 8, [0] * n, [8] * n))


@pytest.mark.parametrize("kind", [Looked, Telling, KeyByKey])
def test_a_wait_ends_when_its_keys_are_stored_and_not_before(watch, kind):
    store, wait = kind(), Waits("k17", *(f"k{n}" for n in range(10)))
    watch(store).add(wait)
    put(store, "other", *(f"k{n}" for n in range(10)))
    time.sleep(0.05)  # a window in which a wrong watch would answer
    assert not any("k17" in told for told in wait.told)
    put(store, "k17")
    eventually(lambda: set(wait.keys) in wait.told)


@pytest.mark.parametrize("kind", [Looked, KeyByKey])
def test_an_error_of_the_store_is_told(watch, kind):
    store, wait = kind(), Waits("a")
    store.error = StoreUnavailable("away")
    watch(store).add(wait)
    eventually(lambda: wait.told == [store.error])


def test_all_who_wait_are_one_look_and_each_key_is_asked_for_once(watch):
    store, watched = Looked(), watch(Looked())
    watched = watch(store)
    for n in range(50):
        watched.add(Waits("both", f"k{n}"))
    look = eventually(lambda: next((keys for keys in store.looks if len(keys) == 51), None))
    assert len(set(look)) == 51


def test_a_waiter_without_news_is_called_when_it_is_due_and_with_news_at_once(watch):
    store = Looked()
    watched, patient, soon = watch(store), Waits("a", "b", interval_s=1e9), Waits("c")
    watched.add(patient)
    watched.add(soon)
    eventually(lambda: len(soon.told) > 3)
    assert patient.told == [set()]
    put(store, "a")
    eventually(lambda: patient.told == [set(), {"a"}])
    store.remove(["a"])
    eventually(lambda: patient.told == [set(), {"a"}, set()])
    put(store, "a", "b")
    eventually(lambda: patient.told[3:] == [{"a", "b"}])


def test_nobody_is_asked_while_nobody_waits(watch):
    store = Telling()
    watched, wait = watch(store), Waits("a")
    watched.add(wait)
    put(store, "a")
    eventually(lambda: wait.told and wait.told[-1] == {"a"})
    time.sleep(0.15)  # a last wait for a change
    before = len(store.looks), store.num_waits
    put(store, "b")
    time.sleep(0.05)
    assert (len(store.looks), store.num_waits) == before
    late = Waits("b")
    watched.add(late)
    eventually(lambda: late.told == [{"b"}])


def test_a_store_that_tells_is_looked_at_when_it_changes(watch):
    store = Telling()
    watched, wait = watch(store, backoff=Backoff(600.0)), Waits("a", interval_s=1e9)
    watched.add(wait)
    eventually(lambda: store.num_waits > 1 and len(store.looks) > 1)  # now it rests
    put(store, "a")
    eventually(lambda: wait.told[-1] == {"a"})


def test_a_store_is_polled_with_pauses(watch):
    store = Looked()
    watched = watch(store)
    for n in range(1000):
        watched.add(Waits(f"k{n}"))
    eventually(lambda: len(store.looks) >= 3)
    before = len(store.looks)
    time.sleep(0.5)
    assert len(store.looks) - before <= 100


class Stray(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("a bug"), Stray("a panic")])
def test_what_no_store_may_raise_is_told_to_those_whose_keys_it_is_about(watch, error):
    store = Looked()
    watched, bad, good = watch(store), Waits("bad"), Waits("good")
    store.about, store.error = "bad", error
    for wait in (good, bad):
        watched.add(wait)
    eventually(lambda: bad.told)
    assert isinstance(bad.told[0], RuntimeError)
    put(store, "good")
    eventually(lambda: good.told[-1] == {"good"})


def test_a_call_that_takes_too_long_is_told(watch):
    store = Looked()
    watched = watch(store, timeout_s=0.05)
    store.released.clear()
    watched.add(Waits("a"))
    eventually(lambda: watched.is_stuck)
    store.released.set()
    eventually(lambda: not watched.is_stuck)


def test_the_end_is_told_to_those_who_wait_and_who_come_late(watch):
    watched, early, late = watch(Looked()), Waits("a", interval_s=1e9), Waits("b")
    watched.add(early)
    watched.close()
    watched.close()
    watched.add(late)
    assert isinstance(early.told[-1], StoreClosed)
    assert isinstance(late.told[-1], StoreClosed)


@pytest.fixture
def clock():
    return Clock()


def test_pauses_grow_up_to_the_longest_and_news_make_them_short_again(clock):
    backoff = Backoff(0.003, clock=clock)
    assert [backoff.next_interval_s(0.0) for _ in range(4)] == pytest.approx(
        [0.002, 0.0026, 0.003, 0.003]
    )
    backoff.restart()
    assert backoff.next_interval_s(0.0) == 0.002


@pytest.mark.parametrize(("duty", "idle_s"), [(0.25, 0.3), (0.5, 0.1)])
def test_slow_calls_take_a_part_of_the_time_at_most(clock, duty, idle_s):
    backoff = Backoff(max_duty=duty, clock=clock)
    assert backoff.next_interval_s(took_s=0.1) == pytest.approx(idle_s)
    backoff.restart()
    assert backoff.remaining_idle_s() == pytest.approx(idle_s)
    clock.now += idle_s
    assert backoff.remaining_idle_s() == pytest.approx(0.0, abs=1e-9)


def test_a_call_that_hung_keeps_later_waiters_from_the_store_for_half_a_second_at_most(clock):
    backoff = Backoff(clock=clock)
    assert backoff.next_interval_s(took_s=5.0) == backoff.remaining_idle_s() == 0.5
