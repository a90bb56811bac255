"""DevicePin: sets the device before each job, and never takes a failure for a success."""

from __future__ import annotations

import pytest
import torch

from pdstore.device_pin import DevicePin
from pdstore.errors import DeviceError
from tests.support.device_api import FakeApi

GPU1 = torch.device("cuda:1")


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
