"""Every device call fails once: the ticket says which, nothing leaks, work goes on."""

from __future__ import annotations

import threading

import native_kit
import pytest
import torch
from test_native_swap import PLAIN, SIZES, Case, host_memory, layout_of, view_of

from pdstore.errors import SwapError
from pdstore.layout import LayerSpec
from pdstore.native import address_of
from pdstore.native_abi import CopyPath
from pdstore.swap import TorchSwap
from pdstore.swap_native import NativeSwap
from pdstore.types import Direction

CODE = 719


@pytest.fixture
def library():
    library = native_kit.library()
    yield library
    library.fail("none", 0, 0)
    library.delay(0)


class Bench:
    """A native swap with host memory for two pool blocks per save or load."""

    def __init__(self, library, device, path=CopyPath.AUTO, slice_bytes=4096) -> None:
        layout = layout_of(layers=(LayerSpec(2, 32),) * 4)
        self.case = Case.of(layout, 40, device, **PLAIN)
        sizes = dict.fromkeys(SIZES, slice_bytes)
        self.swap = NativeSwap(library, layout, self.case.caches, path=path, sizes=sizes)
        self.tables = [[2 * i, 2 * i + 1] for i in range(8)]
        self.host = host_memory(self.case.host_bytes(8), device)
        self.swap.add_host(address_of(view_of(self.host)), len(self.host))
        self.pieces = self.case.pieces(self.tables, 32, view_of(self.host))
        want = host_memory(len(self.host), "cpu")
        TorchSwap(layout, self.case.caches).gather(self.case.pieces(self.tables, 32, view_of(want)))
        self.want = want

    def copy_works(self, direction) -> bool:
        self.host.fill_(0xA5) if direction is Direction.SAVE else self.host.copy_(self.want)
        self.copy(direction)
        return torch.equal(self.host, self.want)

    def copy(self, direction) -> None:
        verb = self.swap.gather if direction is Direction.SAVE else self.swap.scatter
        verb(self.pieces)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("record", CopyPath.AUTO),
        ("synchronize", CopyPath.AUTO),
        ("batch", CopyPath.BATCH),
        ("batch", CopyPath.STAGE),
        ("strided", CopyPath.STRIDED),
        ("stage", CopyPath.STAGE),
    ],
)
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_failed_call_fails_its_copy_alone(library, device, direction, call, path, nth):
    bench = Bench(library, device, path)
    library.fail(call, nth, CODE)
    with pytest.raises(SwapError) as failure:
        bench.copy(direction)
    error = failure.value
    assert error.device_code == CODE
    assert error.slice_number >= 0
    assert error.call
    assert not error.poisoned
    assert bench.copy_works(direction)
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("call", ["batch", "synchronize"])
def test_a_sticky_error_poisons_the_engine_and_fails_what_is_queued(library, device, call):
    bench = Bench(library, device, CopyPath.BATCH)
    library.delay(2000)
    library.fail(call, 3, CODE, sticky=True)
    tickets = [bench.swap.start(Direction.SAVE, bench.pieces) for _ in range(5)]
    outcomes = []
    for ticket in tickets:
        with pytest.raises(SwapError) as failure:
            ticket.wait(30)
        outcomes.append(failure.value)
    assert outcomes[0].device_code == CODE
    assert outcomes[-1].poisoned
    with pytest.raises(SwapError, match="broke"):
        bench.copy(Direction.LOAD)
    library.fail("none", 0, 0)
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("call", ["enter", "stream", "event", "allocate"])
@pytest.mark.parametrize("nth", range(4))
def test_an_engine_that_cannot_be_made_leaves_nothing(library, device, call, nth):
    if call == "enter" and nth > 1:
        pytest.skip("there are two threads")
    library.fail(call, nth, CODE)
    with pytest.raises(SwapError) as failure:
        Bench(library, device)
    assert failure.value.device_code == CODE
    assert library.live() == (0, 0, 0)


def end_of(ticket) -> object:
    try:
        return ticket.wait(0)
    except SwapError as error:
        return str(error)


@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_closing_ends_what_is_queued(library, device):
    bench = Bench(library, device, CopyPath.BATCH)
    library.delay(3000)
    tickets = [
        bench.swap.start(direction, bench.pieces) for direction in Direction for _ in range(20)
    ]
    bench.swap.close()
    ends = [end_of(ticket) for ticket in tickets]
    assert "the engine was closed" in ends
    assert set(ends) <= {True, "the engine was closed"}
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_a_ticket_says_pending_until_the_copy_is_done(library, device):
    bench = Bench(library, device, CopyPath.BATCH)
    library.delay(20_000)
    ticket = bench.swap.start(Direction.SAVE, bench.pieces)
    assert not ticket.done
    assert not ticket.wait(0.001)
    assert ticket.wait(30)
    assert ticket.done
    assert torch.equal(bench.host, bench.want)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("path", list(CopyPath))
def test_threads_save_and_load_at_once(library, device, path):
    layout = layout_of(layers=(LayerSpec(2, 32),) * 4)
    case = Case.of(layout, 64, device, **PLAIN)
    sizes = dict.fromkeys(SIZES, 20_000)
    swap = NativeSwap(library, layout, case.caches, path=path, sizes=sizes)
    before, wrong = case.buffer.clone(), []

    def work(number):
        tables = [[8 * number + 2 * i, 8 * number + 2 * i + 1] for i in range(4)]
        host = host_memory(case.host_bytes(4), device)
        swap.add_host(address_of(view_of(host)), len(host))
        pieces = case.pieces(tables, 32, view_of(host))
        kept = None
        for _ in range(20):
            swap.gather(pieces)
            kept = host.clone() if kept is None else kept
            if not torch.equal(kept, host):
                wrong.append(number)
            swap.scatter(pieces)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert torch.equal(case.buffer, before)
    swap.close()


@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_what_the_caller_gave_may_change_right_after_the_call(library, device):
    bench = Bench(library, device, CopyPath.BATCH)
    library.delay(10_000)
    first = bench.swap.start(Direction.SAVE, bench.pieces[:1])
    ticket = bench.swap.start(Direction.SAVE, bench.pieces)
    bench.tables[0][:] = [39, 39]  # the very list that the piece names
    assert first.wait(30)
    assert ticket.wait(30)
    assert torch.equal(bench.host, bench.want)
