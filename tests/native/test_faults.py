"""Every device call fails once: the ticket says which, nothing leaks, work goes on.

Nothing is launched or copied whose code is not looked at: each call of the table has its test here.
"""

from __future__ import annotations

import mmap

import pytest

from pdstore.errors import Direction, SwapError
from pdstore.native.library import CopyPath, address_of
from pdstore.worker.swap.native import DEFAULT_STREAM, FOLLOW_NOTHING
from tests.support import native_kit
from tests.support.swap_case import SwapBench

CODE = 719
OPENING = ("enter", "stream", "event", "allocate")
SUBMITTING = ("push", "capturing", "event", "record")
COPYING = (
    *(("record", CopyPath.AUTO), ("synchronize", CopyPath.AUTO), ("wait", CopyPath.AUTO)),
    *(("batch", CopyPath.BATCH), ("batch", CopyPath.STAGE)),
    *(("strided", CopyPath.STRIDED), ("stage", CopyPath.STAGE)),
)
ASKING = ("query",)  # in test_ready_events.py
SUMMING = ("sum",)  # in test_parity.py
RECOVERING = ("drain",)
PINNING = ("register", "unregister")


def test_every_call_of_a_device_has_its_test_here():
    copying = {call for call, _ in COPYING}
    assert copying | {*OPENING, *SUBMITTING, *ASKING, *SUMMING, *RECOVERING, *PINNING} == set(
        native_kit.CALLS
    )


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("call", "path"), COPYING)
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_failed_call_fails_its_copy_alone(library, device, direction, call, path, nth):
    bench = SwapBench(library, device, path)
    follow = DEFAULT_STREAM if call == "wait" else FOLLOW_NOTHING
    library.fail(call, nth, CODE)
    ticket = bench.swap.start(direction, bench.copies, stream=follow)
    with pytest.raises(SwapError) as failure:
        ticket.wait(30)
    error = failure.value
    assert error.device_code == CODE
    assert error.slice_number >= 0
    assert error.call
    assert not error.poisoned
    assert bench.copy_works(direction)
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("call", SUBMITTING)
def test_a_copy_that_cannot_follow_its_stream_is_refused(library, device, direction, call):
    bench = SwapBench(library, device)
    library.fail(call, 0, CODE)
    with pytest.raises(SwapError) as failure:
        bench.swap.start(direction, bench.copies, stream=DEFAULT_STREAM)
    assert failure.value.device_code == CODE
    assert failure.value.slice_number == -1
    assert failure.value.call
    assert bench.copy_works(direction)
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("nth", [0, 1])
def test_draining_that_fails_once_after_a_failure_is_tried_again(library, device, direction, nth):
    bench = SwapBench(library, device, CopyPath.BATCH)
    library.fail("drain", nth, CODE)
    library.fail("batch", 1, CODE)
    with pytest.raises(SwapError) as failure:
        bench.copy(direction)
    assert not failure.value.poisoned
    assert bench.copy_works(direction)
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_a_device_that_does_not_recover_poisons_the_engine(library, device):
    bench = SwapBench(library, device, CopyPath.BATCH)
    library.fail("drain", 0, CODE, sticky=True)
    library.fail("batch", 1, CODE)
    with pytest.raises(SwapError):
        bench.copy(Direction.SAVE)
    library.mend()
    with pytest.raises(SwapError, match="broke") as failure:
        bench.copy(Direction.SAVE)
    assert failure.value.poisoned
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("call", PINNING)
def test_memory_that_cannot_be_pinned_or_unpinned_is_an_error(library, device, call):
    ordinal = -1 if device == "cpu" else 0
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    library.fail(call, 0, CODE)

    def pin_and_unpin():
        library.register(ordinal, address_of(memory), len(memory))
        library.unregister(ordinal, address_of(memory))

    with pytest.raises(SwapError) as failure:
        pin_and_unpin()
    assert failure.value.device_code == CODE
    assert call in failure.value.call.lower()
    library.mend()
    if call == "register":
        library.register(ordinal, address_of(memory), len(memory))
    library.unregister(ordinal, address_of(memory))


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("call", ["batch", "synchronize"])
def test_a_sticky_error_poisons_the_engine_and_fails_what_is_queued(library, device, call):
    bench = SwapBench(library, device, CopyPath.BATCH)
    library.delay(50_000)
    library.fail(call, 3, CODE, sticky=True)
    tickets = [bench.swap.start(Direction.SAVE, bench.copies) for _ in range(5)]
    outcomes = []
    for ticket in tickets:
        with pytest.raises(SwapError) as failure:
            ticket.wait(30)
        outcomes.append(failure.value)
    assert outcomes[0].device_code == CODE
    assert outcomes[-1].poisoned
    with pytest.raises(SwapError, match="broke"):
        bench.copy(Direction.LOAD)
    library.mend()
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize(
    ("call", "nth"),
    [(call, nth) for call in OPENING for nth in range(2 if call == "enter" else 4)],  # two threads
)
def test_an_engine_that_cannot_be_made_leaves_nothing(library, device, call, nth):
    library.fail(call, nth, CODE)
    with pytest.raises(SwapError) as failure:
        SwapBench(library, device)
    assert failure.value.device_code == CODE
    assert library.live() == (0, 0, 0)
