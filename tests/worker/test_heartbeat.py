"""Heartbeat and markers: beats while P saves, at most one a period; `started` and `failed`."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore import HandoffId
from pdstore.errors import StoreUnavailable
from pdstore.format.handoff import RING, beat_key, is_beat
from pdstore.format.layout import Pipeline
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.heartbeat import Heartbeat
from tests.support.kv import eventually
from tests.support.pool_kit import P_BLOCKS

PERIOD_S = 0.02
INSTANCE = "cd" * 16
ONE, OTHER = HandoffId.new(INSTANCE), HandoffId.new(INSTANCE)


class Recorder(WrapperStore):
    """Notes when beats are put."""

    def __init__(self, store):
        super().__init__(store)
        self.put_at: list[float] = []
        self.is_away = False

    def put(self, keys, slots):
        assert all(map(is_beat, keys))
        self.put_at.append(time.monotonic())
        if self.is_away:
            raise StoreUnavailable("on purpose")
        return super().put(keys, slots)


@pytest.fixture
def recorder(store):
    return Recorder(store)


@pytest.fixture
def heartbeat(instance, recorder):
    made = []

    def make(**changes):
        one = instance(**changes)
        made.append(Heartbeat(one.settings, one.layout, one.namespace, recorder, PERIOD_S))
        return made[-1]

    yield make
    for each in made:
        each.close()


def beats(recorder, namespace):
    keys = [beat_key(namespace, INSTANCE, n) for n in range(RING)]
    return recorder.wrapped.which_stored(keys)


def test_it_beats_from_a_hand_offs_begin_to_its_end(heartbeat, recorder):
    one = heartbeat()
    one.begin_beats(ONE)
    eventually(lambda: len(recorder.put_at) >= 3)
    one.end_beats(ONE)
    count = len(recorder.put_at)
    time.sleep(7 * PERIOD_S)  # in which it would beat on
    assert len(recorder.put_at) <= count + 1, "the turn that was under way"


def test_many_hand_offs_are_one_beat_a_period(heartbeat, recorder):
    one, begin = heartbeat(), time.monotonic()
    for handoff in (ONE, OTHER, *(HandoffId.new(INSTANCE) for _ in range(20))):
        one.begin_beats(handoff)
    eventually(lambda: len(recorder.put_at) >= 5)
    assert len(recorder.put_at) <= (time.monotonic() - begin) / PERIOD_S
    one.end_beats(ONE)
    count = len(recorder.put_at)
    eventually(lambda: len(recorder.put_at) > count)  # for the others


def test_the_pool_keeps_only_the_last_two_beats(heartbeat, recorder, p):
    one = heartbeat()
    one.begin_beats(ONE)
    for number in (RING, 2 * RING):
        eventually(lambda number=number: len(recorder.put_at) > number)
        assert sum(beats(recorder, p.namespace)) in (2, 3)  # between a put and a remove


def test_it_beats_on_when_the_store_was_away(heartbeat, recorder, p):
    one, recorder.is_away = heartbeat(), True
    one.begin_beats(ONE)
    eventually(lambda: len(recorder.put_at) >= 2)
    assert not any(beats(recorder, p.namespace))
    recorder.is_away = False
    eventually(lambda: any(beats(recorder, p.namespace)))


def test_the_stage_with_the_first_layer_beats_until_the_others_must_have_ended(heartbeat, recorder):
    first, later = (
        heartbeat(layer_ranges=3, pipeline=Pipeline((0, 0, 1), stage)) for stage in range(2)
    )
    later.begin_beats(ONE)
    time.sleep(5 * PERIOD_S)  # in which it would beat
    assert recorder.put_at == []
    first.begin_beats(ONE)
    first.end_beats(ONE)
    eventually(lambda: len(recorder.put_at) >= 3)


def test_a_save_that_ends_soon_costs_no_beat(instance, recorder):
    p = instance()
    keys = p.cache.keys(range(200))
    handoff, _ = p.cache.announce(keys)
    assert handoff.instance is not None
    assert p.pool.save(keys, range(20), handoff=handoff).wait(10).reason is None
    stored = [beat_key(p.namespace, handoff.instance, n) for n in range(RING)]
    assert not any(p.store.which_stored(stored))


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


def test_an_instance_that_does_not_publish_tells_nobody(instance, arena):
    p = instance(over=arena, publish=False)
    save, handoff = begun(p)
    save.job.wait(10)
    assert arena.match([handoff.started(p.namespace)]) == 0
    assert p.pool.start_handoff(handoff, 200).wait(10).reason is not None
    assert p.pool.abort_handoff(handoff).wait(10).reason is not None
