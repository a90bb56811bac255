"""Swap: the defaults that an implementation inherits."""

from __future__ import annotations

from pdstore.worker.swap.torch import TorchSwap
from tests.support.kv import caches_of
from tests.worker.swap.test_torch import layout_of


class Event:
    """An event of an engine's own kind: only the host can wait for it."""

    def __init__(self) -> None:
        self.is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True


def test_an_event_that_the_device_cannot_wait_on_is_waited_for_on_the_host():
    layout = layout_of()
    swap, event = TorchSwap(layout, caches_of(layout)), Event()
    assert swap.to_follow(event) is None
    assert event.is_waited_for
    assert swap.to_follow(None) is None


def test_payloads_may_lie_in_any_memory_unless_a_registrar_says_otherwise():
    layout = layout_of()
    swap = TorchSwap(layout, caches_of(layout))
    assert swap.registrar is None
    with swap.relaxed():
        pass
    swap.close()
    swap.close()
