"""Copies follow events: on the device where they can, else they are waited for before."""

from __future__ import annotations

import threading

import pytest
import torch

from pdstore.native.abi import CopyPath
from pdstore.outcome import Direction
from pdstore.store.memory import MemoryStore
from pdstore.worker.swap.torch import TorchSwap
from tests.support import native_kit
from tests.support.gpu_kit import gpu_instance, rig, spin
from tests.support.kv import BLOCK_BYTES, Instance
from tests.support.swap_case import POISON, SwapBench

gpu = [pytest.mark.cuda, native_kit.needs_gpu]


class DeviceEvent:
    """Stands for an event that the device can wait for; waiting for it on the host is an error."""

    def synchronize(self) -> None:
        raise AssertionError("waited for on the host")


class FollowingSwap(TorchSwap):
    """Says that its copies wait for `DeviceEvent` events, and keeps what they were told."""

    def __init__(self, layout, caches):
        super().__init__(layout, caches)
        self.told = []

    def to_follow(self, ready):
        return ready

    def gather(self, copies, ready=None):
        self.told.append(ready)
        super().gather(copies)

    def scatter(self, copies, ready=None):
        self.told.append(ready)
        super().scatter(copies)


@pytest.fixture
def followed():
    """An instance whose block copies follow `DeviceEvent` events, and its swap."""
    swaps: list[FollowingSwap] = []

    def open_following(layout, caches) -> FollowingSwap:
        swaps.append(FollowingSwap(layout, caches))
        return swaps[0]

    p = Instance(MemoryStore(), range_bytes=2 * BLOCK_BYTES, swap=open_following)
    yield p, swaps[0]
    p.close()


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
    assert swap.to_follow(Model()) is None
    assert swap.to_follow(None) is None
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
def test_a_load_asks_the_store_while_the_model_still_runs(library, device):
    asked = threading.Event()

    class Store(MemoryStore):
        def get(self, keys, slots):
            asked.set()
            return super().get(keys, slots)

    store = Store()
    p = gpu_instance(store, device)
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
    p.close()


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=gpu)])
def test_a_save_reads_what_its_event_says_is_there(library, device):
    p = gpu_instance(MemoryStore(), device)
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
    p.close()
