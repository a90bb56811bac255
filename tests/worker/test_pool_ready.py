"""Ready and flush: the two barriers of an engine, at its start and after its saves."""

from __future__ import annotations

import threading

import pytest

from pdstore.errors import SaveFailed, StoreFull, SwapError
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.swap.torch import TorchSwap
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, load, save


class GatedRegistrar:
    """Registers nothing until the gate opens; then all of it, or it fails."""

    def __init__(self, error=None):
        self.gate, self._error = threading.Event(), error

    def populate(self, address, num_bytes):
        pass

    def register(self, address, num_bytes):
        assert self.gate.wait(30)
        if self._error is not None:
            raise self._error

    def unregister(self, address):
        pass


@pytest.fixture(params=["store", "arena"])
def gated(request, monkeypatch):
    """Opens an instance whose memory a registrar pins; returns both."""
    over = request.getfixturevalue(request.param)  # closed after the instance
    instance = request.getfixturevalue("instance")

    def open_gated(error=None):
        registrar = GatedRegistrar(error)
        monkeypatch.setattr(TorchSwap, "registrar", registrar)
        return instance(over=over, native="off"), registrar

    return open_gated


def test_a_pool_opens_at_once_and_its_jobs_wait_for_pinned_memory(gated):
    p, registrar = gated()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    with pytest.raises(TimeoutError, match="pinned to 0 %"):
        p.pool.ready(0.1)
    assert not job.captured
    registrar.gate.set()
    p.pool.ready()
    assert job.wait(30).num_tokens == 200
    assert load(p, range(200)).num_tokens == 200


def test_memory_that_cannot_be_pinned_fails_ready_and_the_jobs(gated):
    p, registrar = gated(SwapError("no memory to pin"))
    registrar.gate.set()
    with pytest.raises(SwapError, match="to pin"):
        p.pool.ready()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    assert isinstance(job.wait(30).error, SwapError)


def test_a_job_that_waits_for_pinned_memory_can_be_cancelled(gated):
    p, registrar = gated()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    job.cancel()
    assert job.wait(30).num_tokens == 0
    registrar.gate.set()


def test_after_a_flush_every_save_is_durable(p):
    jobs = [p.pool.save(p.cache.keys(range(n, n + 100)), P_BLOCKS) for n in range(8)]
    p.pool.flush(30)
    assert all(job.durable for job in jobs)


def test_a_flush_raises_the_first_error_once(instance, store):
    class Full(WrapperStore):
        def put(self, keys, slots):
            raise StoreFull("no room")

    p = instance(over=Full(store))
    save(p, range(100))
    with pytest.raises(SaveFailed, match="store_full") as caught:
        p.pool.flush(30)
    assert isinstance(caught.value.__cause__, StoreFull)
    p.pool.flush(30)


def test_a_flush_waits_for_a_save_whose_layers_are_not_released(p):
    opened = p.pool.begin_save(p.cache.keys(range(100)), D_BLOCKS)
    with pytest.raises(TimeoutError):
        p.pool.flush(0.05)
    opened.layers_done(len(p.layout.layers))
    p.pool.flush(30)
    assert opened.job.durable
