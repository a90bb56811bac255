"""Markers: `started` is put on the calling thread where the store needs no wait for that."""

from __future__ import annotations

import threading

import pytest

from pdstore.errors import StoreUnavailable
from tests.support.kv import eventually
from tests.support.pool_kit import P_BLOCKS


def begun(p):
    """A save whose first layers are done, and its hand-off."""
    keys = p.cache.keys(range(200))
    handoff, _ = p.cache.announce(keys)
    starts = [(handoff, keys.num_tokens)]
    save = p.pool.begin_save(keys, P_BLOCKS, handoff=handoff, starts=starts)
    save.layers_done(len(p.layout.layers))
    return save, handoff


def test_an_arena_takes_started_on_the_calling_thread(instance, arena):
    p, threads = instance(over=arena), []
    put = arena.put_at_once
    arena.put_at_once = lambda *a: threads.append(threading.current_thread()) or put(*a)
    save, handoff = begun(p)
    assert threads == [threading.current_thread()]
    assert arena.match([handoff.started(p.namespace)]) == 1
    assert save.job.wait(10).reason is None


@pytest.mark.parametrize("answer", [False, StoreUnavailable("away")])
def test_a_worker_puts_what_cannot_be_put_at_once(instance, arena, answer):
    def refuse(*_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    p = instance(over=arena)
    arena.put_at_once = refuse
    save, handoff = begun(p)
    assert eventually(lambda: arena.match([handoff.started(p.namespace)]))
    assert save.job.wait(10).reason is None


def test_a_store_without_that_call_gets_started_from_a_worker(instance, store):
    p = instance()
    save, handoff = begun(p)
    assert eventually(lambda: store.match([handoff.started(p.namespace)]))
    assert save.job.wait(10).reason is None


def test_an_instance_that_does_not_publish_tells_nobody(instance, arena):
    p = instance(over=arena, publish=False)
    save, handoff = begun(p)
    save.job.wait(10)
    assert arena.match([handoff.started(p.namespace)]) == 0
    assert p.pool.start_handoff(handoff, 200).wait(10).reason is not None
    assert p.pool.abort_handoff(handoff).wait(10).reason is not None
