"""Threads: pinned before anything runs, errors kept, ends bounded."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque

import pytest
import torch

from pdstore.device_pin import DevicePin
from pdstore.errors import DeviceError
from pdstore.testing.threads import start_background
from pdstore.threads import Ticker, Worker
from tests.support.device_api import FakeApi
from tests.support.forked import exit_code_of

GPU1 = torch.device("cuda:1")


class Call:
    """A task that calls a function and keeps how it went."""

    def __init__(self, function):
        self.function, self.error, self.ended = function, None, threading.Event()

    def run(self):
        self.function()
        self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()


class Tasks:
    """Gives a worker tasks until it is told to stop."""

    def __init__(self):
        self.tasks, self.changed, self.stopped = deque(), threading.Condition(), False

    def add(self, function) -> Call:
        call = Call(function)
        with self.changed:
            self.tasks.append(call)
            self.changed.notify()
        return call

    def take(self):
        with self.changed:
            self.changed.wait_for(lambda: self.tasks or self.stopped)
            return self.tasks.popleft() if self.tasks else None

    def stop(self):
        with self.changed:
            self.stopped = True
            self.changed.notify()


@pytest.fixture
def tasks():
    tasks = Tasks()
    yield tasks
    tasks.stop()


def test_an_invalid_device_fails_the_constructor(tasks):
    with pytest.raises(DeviceError, match="cuda:7"):
        Worker("w", tasks.take, DevicePin(torch.device("cuda:7"), FakeApi()).hold)


def test_a_worker_runs_on_its_device_and_leaves_the_callers_alone(tasks):
    api, seen = FakeApi(), []
    worker = Worker("w", tasks.take, DevicePin(GPU1, api).hold)
    assert tasks.add(lambda: seen.append(api.current_device())).ended.wait(5)
    assert seen == [1]
    assert api.current_device() == 0
    tasks.stop()
    assert worker.join(5)


def test_a_task_never_runs_on_the_wrong_device(tasks):
    api, ran = FakeApi(), []
    Worker("w", tasks.take, DevicePin(GPU1, api).hold)
    tasks.add(lambda: api.set_device(0)).ended.wait(5)
    api.failures.append("set")
    failed = tasks.add(lambda: ran.append(1))
    assert failed.ended.wait(5)
    assert isinstance(failed.error, DeviceError)
    assert ran == []
    assert tasks.add(lambda: ran.append(api.current_device())).ended.wait(5)
    assert ran == [1]


def test_a_worker_forgets_its_task_before_it_waits(tasks):
    Worker("w", tasks.take)
    call = tasks.add(lambda: None)
    ended, gone = call.ended, weakref.ref(call)
    del call
    assert ended.wait(5)
    tasks.add(lambda: None).ended.wait(5)
    gc.collect()
    assert gone() is None


class Stray(BaseException):
    """Neither an Exception nor an exit: as asyncio.CancelledError or a panic of Rust."""


@pytest.mark.parametrize("kind", [ValueError, Stray, SystemExit, KeyboardInterrupt])
def test_whatever_a_task_raises_goes_to_it_and_the_worker_goes_on(tasks, kind):
    def raises():
        raise kind("odd")

    worker = Worker("w", tasks.take)
    bad, good = tasks.add(raises), tasks.add(lambda: None)
    assert good.ended.wait(5)
    assert good.error is None
    if kind is ValueError:
        assert isinstance(bad.error, ValueError)
    else:
        assert isinstance(bad.error, RuntimeError)
        assert isinstance(bad.error.__cause__, kind)
    tasks.stop()
    assert worker.join(5)


@pytest.mark.parametrize("kind", [RuntimeError, Stray])
def test_a_ticker_goes_on_after_an_exception_and_stops(caplog, kind):
    turns = threading.Semaphore(0)

    def step():
        turns.release()
        raise kind("once")

    ticker = Ticker("t", step)
    assert turns.acquire(timeout=5)
    ticker.wake()
    assert turns.acquire(timeout=5)
    assert ticker.stop(5)
    assert "once" in caplog.text


def test_a_ticker_that_has_nothing_to_do_waits_to_be_woken():
    turns = []
    ticker = Ticker("t", lambda: turns.append(1))
    ticker.wake()
    assert ticker.stop(5)
    assert len(turns) <= 3


def test_turns_exclude_each_other_and_a_ticker_is_not_stopped_in_the_middle_of_one():
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def step():
        begun.release()
        go_on.acquire(timeout=20)

    ticker = Ticker("t", step)
    assert begun.acquire(timeout=5)
    other = threading.Thread(target=ticker.turn)
    other.start()
    assert not begun.acquire(timeout=0.1)
    go_on.release()
    assert begun.acquire(timeout=5)
    assert not ticker.stop(0.1), "somebody else's turn"
    go_on.release()
    other.join(5)
    assert ticker.stop(5)


def test_in_the_child_of_a_fork_a_ticker_is_nothing():
    ticker = Ticker("t", lambda: None)

    def child() -> bool:
        ticker.wake()
        return ticker.stop(0.0)

    assert exit_code_of(child) == 0
    assert ticker.stop(5)


def test_a_turn_of_another_thread_is_not_slept_through():
    """Makes it come between the thread's own turn and its sleep; the next turn is due soon."""
    pauses, third = deque([None, 0.01]), threading.Event()

    def step():
        if pauses:
            return pauses.popleft()
        third.set()
        return None

    turned = threading.Event()

    def turn():
        ticker.turn()
        turned.set()

    def trace(frame, event, argument):
        is_turn = (
            frame.f_code.co_name == "_turn" and frame.f_globals["__name__"] == Ticker.__module__
        )
        if event == "return" and is_turn and len(pauses) == 1:
            has_ticker.wait(10)
            start_background(turn)
            turned.wait(0.3)  # it may have to wait for the thread itself
        return trace

    has_ticker = threading.Event()
    threading.settrace(trace)
    try:
        ticker = Ticker("ticker", step)
    finally:
        threading.settrace(None)
    has_ticker.set()
    assert third.wait(10)
    assert ticker.stop(10)
