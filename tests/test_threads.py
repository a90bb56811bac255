"""Threads: pinned before anything runs, errors kept, ends bounded."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque

import pytest
import torch

from pdstore.async_runner import AsyncRunner
from pdstore.errors import DeviceError
from pdstore.threads import DevicePin, Ticker, Worker

GPU1 = torch.device("cuda:1")


class FakeApi:
    """A device runtime on paper: a current device per thread, and failures on demand."""

    def __init__(self, num_devices: int = 2) -> None:
        self.num_devices = num_devices
        self.calls: list[str] = []
        self.failures: deque[str] = deque()
        self._local = threading.local()

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, index: int) -> None:
        self.calls.append(f"set {index}")
        if self.failures and self.failures[0] == "set":
            self.failures.popleft()
            raise RuntimeError("driver says no")
        if index >= self.num_devices:
            raise RuntimeError("invalid device ordinal")
        self._local.device = index

    def reset_stream(self, index: int) -> None:
        self.calls.append(f"stream {index}")
        if self.failures and self.failures[0] == "stream":
            self.failures.popleft()
            raise RuntimeError("no stream")


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
    """What a worker takes: tasks until it is told to stop."""

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


def test_the_cpu_is_a_device_with_nothing_to_do():
    api = FakeApi()
    DevicePin(torch.device("cpu"), api).hold()
    assert api.calls == []


def test_a_device_without_an_index_is_refused():
    with pytest.raises(DeviceError, match="no index"):
        DevicePin(torch.device("cuda"), FakeApi())


def test_pinning_sets_the_device_once_and_resets_the_stream_each_time():
    api = FakeApi()
    pin = DevicePin(GPU1, api)
    pin.hold()
    pin.hold()
    assert api.calls == ["set 1", "stream 1", "stream 1"]


def test_a_foreign_change_of_device_is_repaired():
    api = FakeApi()
    pin = DevicePin(GPU1, api)
    pin.hold()
    api.set_device(0)
    pin.hold()
    assert api.current_device() == 1


def test_a_failure_is_not_remembered_as_success():
    api = FakeApi()
    pin = DevicePin(GPU1, api)
    for kind in ("set", "stream"):
        api.failures.append(kind)
        with pytest.raises(DeviceError, match="cuda:1"):
            pin.hold()
    pin.hold()
    assert api.current_device() == 1


def test_an_invalid_device_fails_the_constructor(tasks):
    with pytest.raises(DeviceError, match="cuda:7"):
        Worker("w", tasks.take, DevicePin(torch.device("cuda:7"), FakeApi()))


def test_a_worker_runs_on_its_device_and_leaves_the_callers_alone(tasks):
    api, seen = FakeApi(), []
    worker = Worker("w", tasks.take, DevicePin(GPU1, api))
    assert tasks.add(lambda: seen.append(api.current_device())).ended.wait(5)
    assert seen == [1]
    assert api.current_device() == 0
    tasks.stop()
    assert worker.join(5)


def test_a_task_never_runs_on_the_wrong_device(tasks):
    api, ran = FakeApi(), []
    Worker("w", tasks.take, DevicePin(GPU1, api))
    tasks.add(lambda: api.set_device(0)).ended.wait(5)
    api.failures.append("set")
    failed = tasks.add(lambda: ran.append(1))
    assert failed.ended.wait(5)
    assert isinstance(failed.error, DeviceError)
    assert ran == []
    assert tasks.add(lambda: ran.append(api.current_device())).ended.wait(5)
    assert ran == [1]


def test_an_exception_goes_to_its_task_and_the_worker_goes_on(tasks):
    Worker("w", tasks.take)
    bad = tasks.add(lambda: 1 / 0)
    good = tasks.add(lambda: None)
    assert good.ended.wait(5)
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.error is None


def test_a_worker_forgets_its_task_before_it_waits(tasks):
    Worker("w", tasks.take)
    call = tasks.add(lambda: None)
    ended, gone = call.ended, weakref.ref(call)
    del call
    assert ended.wait(5)
    tasks.add(lambda: None).ended.wait(5)
    gc.collect()
    assert gone() is None


def test_a_ticker_goes_on_after_an_exception_and_stops(caplog):
    turns = threading.Semaphore(0)

    def step():
        turns.release()
        raise RuntimeError("once")

    ticker = Ticker("t", step)
    assert turns.acquire(timeout=5)
    ticker.wake()
    assert turns.acquire(timeout=5)
    assert ticker.stop(5)
    assert "t failed" in caplog.text


def test_a_ticker_that_has_nothing_to_do_waits_to_be_woken():
    turns = []
    ticker = Ticker("t", lambda: turns.append(1))
    ticker.wake()
    assert ticker.stop(5)
    assert len(turns) <= 3


@pytest.fixture
def runner():
    runner = AsyncRunner("r")
    yield runner
    assert runner.close()


def test_sync_returns_the_result_once(runner):
    runner.launch(lambda: 42)
    assert runner.sync() == 42
    assert runner.sync() is None


def test_sync_without_a_launch_returns_at_once(runner):
    assert runner.sync() is None


@pytest.mark.parametrize("ask", ["sync", "launch"])
def test_an_exception_is_raised_once_and_the_runner_goes_on(runner, ask):
    runner.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.sync() if ask == "sync" else runner.launch(lambda: 0)
    runner.launch(lambda: 5)
    assert runner.sync() == 5


def test_launches_run_in_order(runner):
    seen = []
    for i in range(100):
        runner.launch(lambda i=i: seen.append(i))
    runner.sync()
    assert seen == list(range(100))


def test_a_function_that_does_not_end_is_a_time_out(runner):
    gate = threading.Event()
    runner.launch(lambda: gate.wait(30))
    with pytest.raises(TimeoutError):
        runner.sync(timeout_s=0.01)
    with pytest.raises(TimeoutError):
        runner.launch(lambda: None, timeout_s=0.01)
    gate.set()
    runner.sync()


def test_the_function_is_released_before_sync_returns(runner):
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    runner.launch(lambda big=big: None)
    del big
    runner.sync()
    assert gone() is None


def test_close_lets_the_running_function_end():
    runner, gate, seen = AsyncRunner("r"), threading.Event(), []
    runner.launch(lambda: (gate.wait(30), seen.append(1)))
    assert not runner.close(timeout_s=0.01)
    gate.set()
    assert runner.close()
    assert seen == [1]
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(lambda: None)


def test_a_runner_on_a_bad_device_fails_its_constructor():
    with pytest.raises(DeviceError):
        AsyncRunner("r", torch.device("meta:7"), FakeApi())
