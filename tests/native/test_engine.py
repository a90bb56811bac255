"""Copies in flight: several at once, from many threads and engines, and closed in the middle."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pdstore.errors import DeviceError, Direction, LayoutError, SwapError
from pdstore.format.identity import LayerSpec
from pdstore.native import library as abi
from pdstore.native.engine import Engine
from pdstore.native.library import CopyPath, address_of
from pdstore.worker.swap.base import TorchSwap
from pdstore.worker.swap.native import NativeSwap
from tests.support import native_kit
from tests.support.kv import caches_of, eventually
from tests.support.swap_case import (
    PLAIN,
    POISON,
    SIZES,
    Case,
    SwapBench,
    host_memory,
    layout_of,
    view_of,
)


def end_of(ticket) -> object:
    try:
        return ticket.wait(0)
    except SwapError as error:
        return str(error)


@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_closing_ends_what_is_queued(library, device):
    bench = SwapBench(library, device, CopyPath.BATCH)
    library.delay(3000)
    tickets = [
        bench.swap.start(direction, bench.copies) for direction in Direction for _ in range(20)
    ]
    bench.swap.close()
    ends = [end_of(ticket) for ticket in tickets]
    assert "the engine was closed" in ends
    assert set(ends) <= {True, "the engine was closed"}
    assert library.live() == (0, 0, 0)


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("path", list(CopyPath))
def test_threads_save_and_load_at_once(library, device, path, closed_after):
    """Scratch and descriptors are nobody else's while a copy uses them."""
    layout = layout_of(layers=(LayerSpec(2, 32),) * 4)
    case = Case.of(layout, 64, device, **PLAIN)
    sizes = dict.fromkeys(SIZES, 20_000)
    swap = closed_after(NativeSwap(library, layout, case.caches, path=path, sizes=sizes))
    before, wrong = case.buffer.clone(), []

    def work(number):
        tables = [[8 * number + 2 * i, 8 * number + 2 * i + 1] for i in range(4)]
        host = host_memory(case.host_bytes(4), device)
        swap.add_host(address_of(view_of(host)), len(host))
        copies = case.copies(tables, 32, view_of(host))
        kept = None
        for _ in range(20):
            swap.gather(copies)
            kept = host.clone() if kept is None else kept
            if not torch.equal(kept, host):
                wrong.append(number)
            swap.scatter(copies)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert torch.equal(case.buffer, before)


@pytest.mark.requirement(
    "R-AR-5, R4", "memory that an asynchronous copy reads stays until the copy has ended"
)
@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_what_the_caller_gave_may_change_right_after_the_call(library, device):
    """No copy reads ids or addresses from the caller's memory once the call has returned."""
    bench = SwapBench(library, device, CopyPath.BATCH)
    library.delay(10_000)
    first = bench.swap.start(Direction.SAVE, bench.copies[:1])
    ticket = bench.swap.start(Direction.SAVE, bench.copies)
    bench.tables[0][:] = [39, 39]  # the very list that the piece names
    assert first.wait(30)
    assert ticket.wait(30)
    assert torch.equal(bench.host, bench.want)


@pytest.mark.requirement("R6", "device memory is bounded and is freed with its owner")
@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("path", list(CopyPath))
def test_a_larger_copy_takes_no_more_device_memory(library, device, path):
    """Scratch is of a fixed size, however long the prompt, and goes with its engine."""
    bench = SwapBench(library, device, path)
    bench.copy(Direction.SAVE)
    before = library.live()
    many = [piece for _ in range(50) for piece in bench.copies]
    assert bench.swap.start(Direction.SAVE, many).wait(30)
    assert bench.swap.start(Direction.LOAD, bench.copies).wait(30)
    assert library.live() == before
    bench.swap.close()
    assert library.live() == (0, 0, 0)


@pytest.mark.requirement(
    "R-AR-3, R5, R24, C9", "nothing mutable is shared between jobs, threads or devices"
)
@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("direction", list(Direction))
def test_parts_that_take_different_paths_are_copied_one_after_the_other(
    library, device, direction, closed_after
):
    """An indexer's pages between MLA's blocks: all pages are a slice, and all blocks another."""
    layers = (LayerSpec.latent(576),) * 2 + (LayerSpec.page(8448, 64, "rows, scales"),) * 2
    layout = layout_of(layers=layers, block_tokens=64, engine_block_tokens=64)
    p, d = (Case.of(layout, 20, device, **PLAIN, seed=seed) for seed in (1, 2))
    swap, of_d = (closed_after(NativeSwap(library, layout, each.caches)) for each in (p, d))
    paths = {plan.part: plan.path for plan in reversed(swap.plan(direction))}  # of whole blocks
    assert sorted(paths.values()) == ["BATCH", "STAGE"]
    host = host_memory(p.host_bytes(16), device)
    for each in (swap, of_d):
        each.add_host(address_of(view_of(host)), len(host))
    copies = p.copies([[id] for id in range(16)], 64, view_of(host))
    calls = {Direction.SAVE: swap.gather, Direction.LOAD: of_d.scatter}
    for each, call in calls.items():
        library.fail("record", 2 if each is direction else -1, 719)  # once for each slice
        call(copies)
    for caches in zip(p.caches, d.caches, strict=True):
        ours, theirs = (cache.flatten(1).view(torch.uint8) for cache in caches)
        assert torch.equal(ours[:16], theirs[:16])
        assert not torch.equal(ours[16:], theirs[16:])


@pytest.mark.parametrize("device", native_kit.DEVICES)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("num_pages", [256, 257])
def test_a_slice_of_small_payloads_has_no_more_copies_than_one_batch_call_may_have(
    library, device, direction, num_pages, closed_after
):
    """Nobody else can use the driver during a batch call."""
    layers = (LayerSpec.page(1056, 16, "rows, scales"),) * 2
    case = Case.of(layout_of(layers=layers, block_tokens=16), 257, device, **PLAIN)
    swap = closed_after(NativeSwap(library, case.layout, case.caches))
    assert {plan.path for plan in swap.plan(direction)} == {"STAGE"}
    host = host_memory(case.host_bytes(num_pages), device)
    swap.add_host(address_of(view_of(host)), len(host))
    copies = case.copies([[id] for id in range(num_pages)], 16, view_of(host))
    library.fail("record", 1, 719)  # of a second slice
    ticket = swap.start(direction, copies)
    if num_pages <= 256:
        assert ticket.wait(30)
        return
    with pytest.raises(SwapError) as failure:
        ticket.wait(30)
    assert failure.value.slice_number == 1


@pytest.mark.parametrize("device", native_kit.DEVICES)
def test_engines_of_two_layouts_share_nothing(library, device):
    """No table or buffer is the process's: one engine's copies do not show in another's."""
    benches = [SwapBench(library, device, CopyPath.STAGE, size) for size in (1000, 300_000)]
    other = layout_of(layers=(LayerSpec.latent(48),) * 7)
    case = Case.of(other, 40, device, **{**PLAIN, "pad": 3, "offset": 1})
    swap = NativeSwap(library, other, case.caches, path=CopyPath.STAGE)
    host = host_memory(case.host_bytes(8), device)
    swap.add_host(address_of(view_of(host)), len(host))
    copies = case.copies(benches[0].tables, 32, view_of(host))
    want = host_memory(len(host), "cpu")
    TorchSwap(other, case.caches).gather(case.copies(benches[0].tables, 32, view_of(want)))
    for _ in range(5):
        host.fill_(POISON)
        for bench in benches:
            bench.host.fill_(POISON)
        tickets = [s.start(Direction.SAVE, p) for s, p in [(b.swap, b.copies) for b in benches]]
        tickets.append(swap.start(Direction.SAVE, copies))
        assert all(ticket.wait(30) for ticket in tickets)
        assert torch.equal(host, want)
        assert all(torch.equal(bench.host, bench.want) for bench in benches)
    benches[0].swap.close()
    swap.gather(copies)
    assert torch.equal(host, want)
    swap.close()
    benches[1].swap.close()


def test_a_forked_child_may_not_use_the_engine_of_its_parent():
    native_kit.open_library()
    program = """
import os
from tests.support import native_kit
from tests.support.kv import caches_of
from tests.worker.swap.test_torch import layout_of, copy_of
from pdstore.format.keys import Part
from pdstore.worker.swap.native import NativeSwap
layout = layout_of()
swap = NativeSwap(native_kit.open_library(), layout, caches_of(layout, 10))
pid = os.fork()
if pid == 0:
    try:
        swap.gather([copy_of(layout, Part(0, 0), [1, 2], 8)])
    except RuntimeError as error:
        os._exit(0 if "parent process" in str(error) else 1)
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
swap.gather([copy_of(layout, Part(0, 0), [1, 2], 8)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=60
    )
    assert done.returncode == 0


def test_engines_and_tickets_that_outlive_their_modules_globals_end_in_silence(library):
    """Programs end without closing them, and an extension may hold the modules until then."""
    program = """
import ctypes, sys, types
holder = sys.modules["holder"] = types.ModuleType("holder")
import pdstore.native.engine
from pdstore.errors import Direction
from pdstore.native.library import CopyPath
from tests.support import native_kit
from tests.support.swap_case import SwapBench
holder.bench = SwapBench(native_kit.open_library(), native_kit.DEVICES[0], CopyPath.BATCH)
holder.ticket = holder.bench.swap.start(Direction.SAVE, holder.bench.copies)
assert holder.ticket.wait(30)
for module in holder, pdstore.native.engine:  # the later a module came, the sooner it is emptied
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""
    command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.requirement(
    "R-DEV-9, 10", "a device is explicit and valid", note="the device is that of the KV tensors"
)
@pytest.mark.parametrize("device", [-2, 99, 2**31 - 1])
def test_a_missing_device_fails_the_constructor(device):
    layout = layout_of(
        dtype="uint8", rope="", layers=(LayerSpec(1, 4),), block_tokens=1, engine_block_tokens=1
    )
    with pytest.raises(DeviceError, match="no CUDA device"):
        NativeSwap(
            native_kit.open_library(),
            layout,
            caches_of(layout, 2, fill=0),
            sizes={"device": device},
        )


@pytest.mark.requirement("R18", "a direction other than load or save is an error")
@pytest.mark.parametrize("direction", [-1, 2, 7])
def test_a_number_that_is_no_direction_is_an_error_and_copies_nothing(library, direction):
    cache, payload = bytearray(b"c" * 64), bytearray(b"p" * 16)
    base, to = address_of(memoryview(cache)), address_of(memoryview(payload))
    region = abi.Region(base=base, block_stride=16, token_stride=8, head_stride=8, width=8)
    options = {"device": abi.CPU}
    engine = Engine(library, options, [abi.PartShape(1, 1, 8, 4, 2, 2)], [region])
    item, ids = abi.Item(payload=to, num_tokens=2, num_ids=1), bytes(8)
    with pytest.raises(LayoutError):
        engine.submit(direction, bytes(item), ids)
    assert engine.submit(0, bytes(item), ids).wait(10)
    engine.close()
    assert (cache, payload) == (b"c" * 64, b"c" * 16)


def test_close_waits_for_a_call_that_was_lent_the_engine_and_refuses_new_ones(library):
    bench = SwapBench(library, "cpu", CopyPath.BATCH)
    engine = bench.swap.engine

    def is_refused() -> bool:
        try:
            engine.explain(0, 0, 1)
        except SwapError:
            return True
        return False

    with engine.lent():
        closer = threading.Thread(target=engine.close)
        closer.start()
        eventually(is_refused)
        assert closer.is_alive()
    closer.join(10)
    assert not closer.is_alive()
    with pytest.raises(SwapError, match="closed"), engine.lent():
        pass
