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
    assert runner.sync() is None
    runner.launch(lambda: 42)
    assert runner.sync() == 42
    assert runner.sync() is None


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
        AsyncRunner("r", torch.device("meta:7"), FakeApi())
