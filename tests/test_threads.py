"""Threads, device pinning and AsyncRunner."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

import pytest
import torch

from pdstore.async_runner import AsyncRunner, DevicePin
from pdstore.errors import DeviceError
from pdstore.testing.values import exit_code_of, start_background
from pdstore.threads import Ticker, Worker
from tests.support.device_api import FakeApi

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


@pytest.fixture
def tasks():
    """A worker's queue; None ends it."""
    queue = SimpleQueue()
    yield queue
    queue.put(None)


def added(tasks, function) -> Call:
    call = Call(function)
    tasks.put(call)
    return call


@pytest.mark.requirement(
    "R-DEV-7, 8",
    "a pin that keeps failing does not spin",
    note="decided otherwise: it fails the constructor",
)
def test_an_invalid_device_fails_the_constructor(tasks):
    with pytest.raises(DeviceError, match="cuda:7"):
        Worker("w", tasks.get, DevicePin(torch.device("cuda:7"), FakeApi()).hold)


@pytest.mark.requirement("R-DEV-5", "pinning can be tested without a GPU")
def test_a_worker_runs_on_its_device_and_leaves_the_callers_alone(tasks):
    api, seen = FakeApi(), []
    worker = Worker("w", tasks.get, DevicePin(GPU1, api).hold)
    assert added(tasks, lambda: seen.append(api.current_device())).ended.wait(5)
    assert seen == [1]
    assert api.current_device() == 0
    tasks.put(None)
    assert worker.join(5)


@pytest.mark.requirement("R-DEV-1", "a thread that is not on its device copies nothing")
def test_a_task_never_runs_on_the_wrong_device(tasks):
    api, ran = FakeApi(), []
    Worker("w", tasks.get, DevicePin(GPU1, api).hold)
    added(tasks, lambda: api.set_device(0)).ended.wait(5)
    api.failures.append("set")
    failed = added(tasks, lambda: ran.append(1))
    assert failed.ended.wait(5)
    assert isinstance(failed.error, DeviceError)
    assert ran == []
    assert added(tasks, lambda: ran.append(api.current_device())).ended.wait(5)
    assert ran == [1]


class Stray(BaseException):
    """Neither an Exception nor an exit: as asyncio.CancelledError or a panic of Rust."""


@pytest.mark.parametrize("kind", [ValueError, Stray, SystemExit, KeyboardInterrupt])
def test_whatever_a_task_raises_goes_to_it_and_the_worker_goes_on(tasks, kind):
    def raises():
        raise kind("odd")

    worker = Worker("w", tasks.get)
    bad, good = added(tasks, raises), added(tasks, lambda: None)
    assert good.ended.wait(5)
    assert good.error is None
    if kind is ValueError:
        assert isinstance(bad.error, ValueError)
    else:
        assert isinstance(bad.error, RuntimeError)
        assert isinstance(bad.error.__cause__, kind)
    tasks.put(None)
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


def test_a_device_without_an_index_is_refused():
    with pytest.raises(DeviceError, match="no index"):
        DevicePin(torch.device("cuda"), FakeApi())


def test_pinning_sets_the_device_once_and_resets_the_stream_each_time():
    api = FakeApi()
    pin = DevicePin(GPU1, api)
    pin.hold()
    pin.hold()
    assert api.calls == ["set 1", "stream 1", "stream 1"]


def test_a_failure_is_not_remembered_as_success():
    api = FakeApi()
    pin = DevicePin(GPU1, api)
    for kind in ("set", "stream"):
        api.failures.append(kind)
        with pytest.raises(DeviceError, match="cuda:1"):
            pin.hold()
    pin.hold()
    assert api.current_device() == 1


@pytest.fixture
def runner():
    runner = AsyncRunner("r")
    yield runner
    assert runner.close()


def test_sync_returns_the_result_once(runner):
    assert runner.sync() is None
    runner.launch(lambda: 42)
    assert runner.sync() == 42
    assert runner.sync() is None


@pytest.mark.requirement("R-AR-1, 2", "an exception is raised once, and the runner goes on")
@pytest.mark.parametrize("ask", ["sync", "launch"])
def test_an_exception_is_raised_once_and_the_runner_goes_on(runner, ask):
    runner.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.sync() if ask == "sync" else runner.launch(lambda: 0)
    runner.launch(lambda: 5)
    assert runner.sync() == 5


def test_a_function_that_does_not_end_is_a_time_out(runner):
    gate = threading.Event()
    runner.launch(lambda: gate.wait(30))
    with pytest.raises(TimeoutError):
        runner.sync(timeout_s=0.01)
    with pytest.raises(TimeoutError):
        runner.launch(lambda: None, timeout_s=0.01)
    gate.set()
    runner.sync()


def test_close_lets_the_running_function_end():
    runner, gate, seen = AsyncRunner("r"), threading.Event(), []
    runner.launch(lambda: (gate.wait(30), seen.append(1)))
    assert not runner.close(timeout_s=0.01)
    gate.set()
    assert runner.close()
    assert seen == [1]
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(lambda: None)


@pytest.mark.requirement(
    "R-AR-4, 12", "a result is there only after `sync`, made in the caller's modes"
)
@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_function_runs_in_the_callers_inference_and_gradient_mode(runner, is_inference, has_grad):
    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
        runner.launch(lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        want = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    assert runner.sync() == want
    runner.launch(torch.is_inference_mode_enabled)
    assert runner.sync() is False


def spin_then(device, milliseconds, function):
    """Keeps the current stream of a device busy, then queues `function` behind it."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(milliseconds * 1.5e6))
        return function()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
def test_the_stream_of_the_runners_device_follows_whatever_device_is_current():
    """A runner of cuda:1 spins and then writes; its caller has cuda:0 as its current device."""
    runner: AsyncRunner[torch.Tensor] = AsyncRunner("r", torch.device("cuda:1"))
    out = torch.zeros(1 << 16, device="cuda:1")
    seen = torch.zeros_like(out)
    with torch.cuda.device(0):
        for i in range(1000):
            runner.launch(lambda i=i: spin_then(1, 0.2, lambda: out.fill_(i)))
            assert runner.sync() is out
            seen.copy_(out)
            assert seen.eq(i).all(), i
    assert runner.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_what_a_failed_function_had_queued_is_followed_and_no_later_call_waits_for_it():
    runner: AsyncRunner[None] = AsyncRunner("r", torch.device("cuda:0"))
    out = torch.zeros(1 << 16, device="cuda:0")

    def fail():
        spin_then(0, 20, lambda: out.fill_(1))
        raise ValueError("half-way")

    runner.launch(fail)
    with pytest.raises(ValueError, match="half-way"):
        runner.sync()
    out.fill_(2)  # behind the failed function's write
    assert runner.sync() is None
    torch.cuda.synchronize()
    assert out.eq(2).all()
    assert runner.close()


def test_a_runner_on_a_bad_device_fails_its_constructor():
    with pytest.raises(DeviceError):
        AsyncRunner("r", torch.device("meta:99"))
