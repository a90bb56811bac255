"""OpenSave: layer ranges are stored while later layers are still computed."""

from __future__ import annotations

import threading

import pytest

from pdstore import LayerSpec
from pdstore.errors import Reason
from pdstore.format.keys import Kind, kind_of
from pdstore.format.plan import SavePlan
from pdstore.store.wrappers import WrapperStore
from tests.support.kv import POISON, eventually
from tests.support.pool_kit import P_BLOCKS, assert_loaded, load

LAYERS = (LayerSpec(2, 8),) * 6


@pytest.fixture
def p(instance):
    return instance(layers=LAYERS, layer_ranges=3, workers=4, range_bytes=1)


@pytest.fixture
def d(instance):
    return instance(layers=LAYERS, layer_ranges=3, fill=POISON)


class Event:
    """An event that fires when a test says so."""

    def __init__(self, *, has_fired=False):
        self.fired = threading.Event()
        if has_fired:
            self.fired.set()

    def synchronize(self):
        assert self.fired.wait(10)

    def query(self):
        return self.fired.is_set()


def num_stored(p, store, keys, layer_range) -> int:
    parts = p.layout.parts_of[layer_range]
    return store.match(keys.store_keys(parts))


def test_a_range_is_stored_before_later_layers_are_done(p, d, store):
    keys = p.cache.keys(range(200))
    want = [cache.clone() for cache in p.caches]
    for cache in p.caches:
        cache.fill_(0)
    save = p.pool.begin_save(SavePlan(keys), P_BLOCKS)
    for layer in range(6):
        assert not save.job.done
        p.caches[layer].copy_(want[layer])  # the model computes a layer
        save.layers_done(layer + 1)
        if layer % 2:
            eventually(lambda layer=layer: num_stored(p, store, keys, layer // 2) == 4)
            assert layer == 5 or num_stored(p, store, keys, layer // 2 + 1) == 0
    assert save.job.wait(10).num_tokens == 200
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)


def test_nothing_is_read_before_the_last_layer_of_a_range_is_done(p, store):
    keys = p.cache.keys(range(100))
    save = p.pool.begin_save(SavePlan(keys), P_BLOCKS)
    save.layers_done(1)
    other = p.pool.save(p.cache.keys(range(9)), P_BLOCKS)
    assert other.wait(10).reason is None
    assert num_stored(p, store, keys, 0) == 0
    assert not save.job.captured
    save.layers_done(6)
    assert save.job.wait(10).reason is None


def test_a_range_waits_for_its_own_event(p, d):
    events = [Event() for _ in range(3)]
    save = p.pool.begin_save(SavePlan(p.cache.keys(range(200))), P_BLOCKS)
    for n, event in enumerate(events):
        save.layers_done(2 * n + 2, event)
    for event in reversed(events):
        assert not save.job.done
        event.fired.set()
    assert save.job.wait(10).num_tokens == 200
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_no_worker_waits_for_the_model_while_computed_layers_wait_for_a_worker(
    instance, is_awaited
):
    """A large prompt's layers come before those of a small one that the model computes later.

    That is so for each part of a large prompt, although only its last save hands it off.
    """
    p, jobs = instance(layers=LAYERS, layer_ranges=3, workers=2), []  # one worker is for loads
    events = [Event(), Event(), Event(), Event(has_fired=True)]
    for n, (event, num_tokens) in enumerate(zip(events, (9, 200, 20, 150), strict=True)):
        keys = p.cache.keys(range(1000 * n, 1000 * n + num_tokens))
        handoff = p.cache.announce(keys)[0] if is_awaited and num_tokens < 100 else None
        save = p.pool.begin_save(SavePlan(keys, handoff=handoff, is_awaited=is_awaited), P_BLOCKS)
        save.layers_done(6, event)
        jobs.append(save.job)
    for n in (0, 3, 1, 2):
        events[n].fired.set()
        assert jobs[n].wait(10).reason is None


@pytest.mark.parametrize(("queued", "will_continue"), [((2, 4), False), ((2, 4, 6), True)])
def test_ranges_behind_events_begin_when_the_thread_has_no_more_to_queue(
    p, d, store, queued, will_continue
):
    """Workers that begin sooner would hold up the thread that queues the other layers."""
    keys = p.cache.keys(range(200))
    save = p.pool.begin_save(SavePlan(keys), P_BLOCKS)
    for num_layers in queued:
        save.layers_done(num_layers, Event(has_fired=True), will_continue=will_continue)
    other = p.pool.save(p.cache.keys(range(9)), P_BLOCKS)
    assert other.wait(10).reason is None
    assert num_stored(p, store, keys, 0) == 0
    save.layers_done(6, Event(has_fired=True))
    assert save.job.wait(10).num_tokens == 200
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)


def test_a_handoff_is_marked_done_only_after_the_last_layer(p, d, store):
    keys = p.cache.keys(range(200))
    attempt, params = p.cache.announce(keys)
    save = p.pool.begin_save(SavePlan(keys, handoff=attempt), P_BLOCKS)
    save.layers_done(4)
    eventually(lambda: num_stored(p, store, keys, 1) == 4)
    assert store.match([attempt.done(p.namespace, 0)]) == 0
    save.layers_done(6)
    found = eventually(d.cache.lookup(d.cache.keys(range(200)), params).poll)
    assert found.num_tokens == 200


def test_a_handoff_that_falls_short_reads_no_layer_before_it_is_done(instance, store):
    """The save looks for what is missing, and saves again only what has been computed."""

    class Picky(WrapperStore):
        has_refused = False

        def put(self, keys, slots):
            if self.has_refused or kind_of(keys[0]) is not Kind.BLOCK:
                return super().put(keys, slots)
            self.has_refused = True
            return 0  # a store need not say why it takes no more

    p = instance(layers=LAYERS, layer_ranges=3, workers=4, range_bytes=1, over=Picky(store))
    keys = p.cache.keys(range(200))
    handoff, _ = p.cache.announce(keys)
    save = p.pool.begin_save(SavePlan(keys, handoff=handoff), P_BLOCKS)
    save.layers_done(2)
    result = save.job.wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.STORE_ERROR)
    assert [num_stored(p, store, keys, n) for n in (1, 2)] == [0, 0]
    assert not p.store.match([handoff.done(p.namespace, 0)])


def test_a_save_that_is_never_finished_ends_at_its_deadline(instance):
    p = instance(layers=LAYERS, layer_ranges=3, deadline_s=0.1, range_bytes=1)
    save = p.pool.begin_save(SavePlan(p.cache.keys(range(100))), P_BLOCKS)
    save.layers_done(2)
    assert save.job.wait(10).reason is Reason.DEADLINE
    save.layers_done(6)
    eventually(lambda: p.pool.num_jobs == 0)


def test_a_cancelled_save_takes_no_more_layers(p, store):
    keys = p.cache.keys(range(100))
    save = p.pool.begin_save(SavePlan(keys), P_BLOCKS)
    save.job.cancel()
    save.layers_done(6)
    assert save.job.result.reason is Reason.CANCELLED
    assert num_stored(p, store, keys, 0) == 0
