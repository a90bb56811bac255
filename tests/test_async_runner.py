"""AsyncRunner: results once, exceptions once, in order, bounded."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from pdstore.async_runner import AsyncRunner
from pdstore.errors import DeviceError
from tests.support.device_api import FakeApi


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
