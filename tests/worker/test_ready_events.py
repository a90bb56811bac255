"""Copies wait for events, and jobs for pinned memory."""

from __future__ import annotations

import logging
import mmap
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdstore.errors import Direction, SwapError
from pdstore.native.library import CopyPath
from pdstore.store.memory import MemoryStore
from pdstore.worker.swap.base import TorchSwap
from pdstore.worker.transfer import staging as staging_module
from pdstore.worker.transfer.staging import PinnedMemory, spans_of
from tests.support import native_kit
from tests.support.gpu_kit import gpu_instance, rig, spin
from tests.support.kv import BLOCK_BYTES, Instance
from tests.support.swap_case import POISON, SwapBench

gpu = [pytest.mark.cuda, native_kit.needs_gpu]


class DeviceEvent:
    """Stands for an event that the device can wait for; waiting for it on the host is an error."""

    def synchronize(self) -> None:
        raise AssertionError("waited for on the host")

    def query(self) -> bool:
        return False


class FollowingSwap(TorchSwap):
    """Says that its copies wait for `DeviceEvent` events, and keeps what they were told."""

    def __init__(self, layout, caches):
        super().__init__(layout, caches)
        self.told = []

    def device_event_or_wait(self, ready):
        return ready

    def gather(self, copies, ready=None):
        self.told.append(ready)
        super().gather(copies)

    def scatter(self, copies, ready=None):
        self.told.append(ready)
        super().scatter(copies)


@pytest.fixture
def followed(closed_after):
    """An instance whose block copies follow `DeviceEvent` events, and its swap."""
    swaps: list[FollowingSwap] = []

    def open_following(layout, caches) -> FollowingSwap:
        swaps.append(FollowingSwap(layout, caches))
        return swaps[0]

    more = {"range_bytes": 2 * BLOCK_BYTES, "swap": open_following}
    return closed_after(Instance(MemoryStore(), **more)), swaps[0]


@pytest.mark.requirement("R-AW-17", "a save's event is recorded on the caller's stream")
@pytest.mark.parametrize("publishes", [False, True])
def test_a_save_hands_its_event_to_every_copy(followed, publishes):
    """So does a load."""
    p, swap = followed
    event = DeviceEvent()
    keys = p.cache.keys(list(range(600)))
    handoff = p.cache.announce(keys, None)[0] if publishes else None
    job = p.pool.save(keys, list(range(38)), ready=event, handoff=handoff)
    assert job.wait(20).num_tokens == 600
    num_saved = len(swap.told)
    assert p.pool.load(keys, list(range(38)), ready=event).wait(20).num_tokens == 600
    assert min(num_saved, len(swap.told) - num_saved) >= 4
    assert all(ready is event for ready in swap.told)


@pytest.mark.parametrize("native", [True, False])
def test_an_event_that_copies_cannot_follow_is_waited_for_before_a_byte_is_read(library, native):
    bench = SwapBench(library, "cpu")
    swap = bench.swap if native else TorchSwap(bench.case.layout, bench.case.caches)
    bench.case.buffer.fill_(7)

    class Model:
        def synchronize(self):
            bench.case.buffer.fill_(9)

    swap.gather(bench.copies, Model())
    assert all(set(bytes(piece.payload)) == {9} for piece in bench.copies)
    bench.host.fill_(POISON)
    assert swap.device_event_or_wait(Model()) is None
    assert swap.device_event_or_wait(None) is None
    bench.swap.close()


@pytest.mark.parametrize("path", [CopyPath.BATCH, CopyPath.STRIDED, CopyPath.STAGE])
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=gpu)])
def test_a_copy_that_need_not_wait_passes_one_that_does(library, device, path):
    _case, swap, _host, copies = rig(library, path, device)
    event = torch.cuda.Event()
    spin(300)
    event.record()
    late = swap.start(Direction.SAVE, copies[:8], ready=event.cuda_event)
    for _ in range(4):
        assert swap.start(Direction.SAVE, copies[8:]).wait(30)
    assert not event.query()
    assert not late.wait(0)
    assert late.wait(30)
    assert event.query()
    swap.close()


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=gpu)])
def test_a_load_asks_the_store_while_the_model_still_runs(library, device, closed_after):
    asked = threading.Event()

    class Store(MemoryStore):
        def get(self, keys, slots):
            asked.set()
            return super().get(keys, slots)

    p = closed_after(gpu_instance(Store(), device))
    keys = p.cache.keys(list(range(333)))
    assert p.pool.save(keys, list(range(21))).wait(20).num_tokens == 333
    want = p.tokens(range(21))[:333]
    spin(500)
    for cache in p.caches:
        cache[:64] = -7
    event = torch.cuda.Event()
    event.record()
    job = p.pool.load(keys, list(range(21)))
    assert asked.wait(20)
    assert not event.query()
    assert job.wait(20).num_tokens == 333
    assert torch.equal(p.tokens(range(21))[:333], want)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=gpu)])
def test_a_save_reads_what_its_event_says_is_there(library, device, closed_after):
    p = closed_after(gpu_instance(MemoryStore(), device))
    keys = p.cache.keys(list(range(333)))
    spin(100)
    for cache in p.caches:
        cache.normal_()
    event = torch.cuda.Event()
    event.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        job = p.pool.save(keys, list(range(21)), ready=event)
    want = p.tokens(range(21))[:333]
    assert job.wait(20).num_tokens == 333
    assert p.pool.load(keys, list(range(30, 51))).wait(20).num_tokens == 333
    assert torch.equal(p.tokens(range(30, 51))[:333], want)


PAGE = 4096


class FakeRegistrar:
    """Remembers calls; `fail_at` is the number of the registration that fails."""

    def __init__(self, fail_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.fail_at, self.gate = fail_at, gate
        self.calls: list[tuple[str, int]] = []
        self.present: set[int] = set()

    def populate(self, address, num_bytes):
        self.present.add(address)

    def register(self, address, num_bytes):
        assert address in self.present
        if self.gate is not None:
            assert self.gate.wait(30)
        registered = [a for verb, a in self.calls if verb == "register"]
        if len(registered) == self.fail_at:
            raise SwapError("no memory to pin (error 2 of cudaHostRegister)")
        self.calls.append(("register", address))

    def unregister(self, address):
        self.calls.append(("unregister", address))

    def verbs(self, verb):
        return [a for v, a in self.calls if v == verb]


def pinned_of(num_pages, registrar, pages_of_a_piece=1, **options) -> PinnedMemory:
    view, size = memoryview(mmap.mmap(-1, num_pages * PAGE)), pages_of_a_piece * PAGE
    return PinnedMemory(view, PAGE, registrar, span_bytes=size, **options)


@pytest.mark.requirement("R-PIN-6, R19", "no value lies in two registered pieces")
@given(
    slot_pages=st.integers(1, 40),
    num_slots=st.integers(1, 200),
    span_bytes=st.integers(1, 400 * PAGE),
)
def test_every_slot_is_in_one_span_whole(slot_pages, num_slots, span_bytes):
    slot, base = slot_pages * PAGE, 1 << 20
    spans = spans_of(base, num_slots * slot, slot, span_bytes)
    at = base
    for address, num_bytes in spans:
        assert address == at
        assert num_bytes % slot == 0
        assert num_bytes <= max(slot, span_bytes)
        at += num_bytes
    assert at == base + num_slots * slot


@pytest.mark.requirement(
    "R-PIN-11",
    "pages are made present by several threads before they are pinned; NUMA by choice",
    note="at most four threads, and the placement is the launcher's",
)
def test_pieces_are_made_present_side_by_side_before_they_are_registered(closed_after):
    class Together(FakeRegistrar):
        several = threading.Barrier(4)

        def populate(self, address, num_bytes):
            self.several.wait(30)
            super().populate(address, num_bytes)

    closed_after(pinned_of(64, Together(), 4)).ready(30)


@pytest.mark.requirement("R-PIN-1", "a wait for pinning ends and says why it failed")
@pytest.mark.requirement("R-PIN-7, 12", "registering is all or nothing, and a failure is an error")
@pytest.mark.parametrize("fail_at", [0, 7, 15])
def test_when_a_piece_fails_the_others_are_undone_and_ready_says_why(fail_at):
    registrar = FakeRegistrar(fail_at)
    pinned = pinned_of(64, registrar, 4)
    with pytest.raises(SwapError, match="cudaHostRegister"):
        pinned.ready(30)
    assert registrar.verbs("unregister") == registrar.verbs("register")[::-1]
    assert len(registrar.verbs("register")) == fail_at
    pinned.close()
    assert len(registrar.verbs("unregister")) == fail_at


def test_ready_has_a_deadline_and_says_how_far_it_is(closed_after):
    gate = threading.Event()
    pinned = closed_after(pinned_of(8, FakeRegistrar(gate=gate)))
    with pytest.raises(TimeoutError, match="0 %"):
        pinned.ready(0.01)
    gate.set()
    pinned.ready(30)


@pytest.mark.requirement("R-PIN-2", "pinning runs beside an engine's start")
def test_who_waits_for_it_is_told_how_far_it_is(monkeypatch):
    gate, lines = threading.Event(), []

    class OpenGate(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            gate.set()

    handler = OpenGate()
    monkeypatch.setattr(staging_module.log, "handlers", [handler])
    monkeypatch.setattr(staging_module.log, "level", logging.INFO)
    pinned = pinned_of(8, FakeRegistrar(gate=gate), report_s=0.001)
    pinned.ready(30)
    pinned.close()
    assert lines[0] == "staging is pinned to 0 % of 0.0 GiB"


def test_closing_in_the_middle_unregisters_what_was_registered():
    gate = threading.Event()
    registrar = FakeRegistrar(gate=gate)
    pinned = pinned_of(8, registrar)
    closer = threading.Thread(target=pinned.close)
    closer.start()
    gate.set()
    closer.join(30)
    assert registrar.verbs("unregister") == registrar.verbs("register")[::-1]
    assert not pinned.progress
