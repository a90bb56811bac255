"""Beats of a P that saves, and a P that dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdstore import HandoffId, Reason
from pdstore.errors import StoreUnavailable
from pdstore.format.handoff import NUM_BEAT_KEYS, beat_key
from pdstore.format.layout import Pipeline
from pdstore.format.plan import Announcement, SavePlan
from pdstore.store import open_store
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.heartbeat import Heartbeat
from tests.support.child import child
from tests.support.kv import POISON, Instance, eventually, settings_of
from tests.support.pool_kit import P_BLOCKS
from tests.support.redis_server import RedisServer

BEAT_INTERVAL_S = 0.02
INSTANCE = "cd" * 16
ONE, OTHER = HandoffId.new(INSTANCE), HandoffId.new(INSTANCE)


class Recorder(WrapperStore):
    """Notes when beats are put."""

    def __init__(self, store):
        super().__init__(store)
        self.put_at: list[float] = []
        self.is_away = False

    def put(self, keys, slots):
        assert all(key.endswith(":beat") for key in keys)
        self.put_at.append(time.monotonic())
        if self.is_away:
            raise StoreUnavailable("on purpose")
        return super().put(keys, slots)


@pytest.fixture
def recorder(store):
    return Recorder(store)


@pytest.fixture
def heartbeat(instance, recorder, closed_after):
    def make(**changes):
        one = instance(**changes)
        return closed_after(
            Heartbeat(one.settings, one.layout, one.namespace, recorder, BEAT_INTERVAL_S)
        )

    return make


def beats(recorder, namespace):
    keys = [beat_key(namespace, INSTANCE, n) for n in range(NUM_BEAT_KEYS)]
    return recorder.wrapped.which_stored(keys)


def test_it_beats_from_a_hand_offs_begin_to_its_end(heartbeat, recorder):
    one = heartbeat()
    one.begin_beats(ONE)
    eventually(lambda: len(recorder.put_at) >= 3)
    one.end_beats(ONE)
    count = len(recorder.put_at)
    time.sleep(7 * BEAT_INTERVAL_S)  # in which it would beat on
    assert len(recorder.put_at) <= count + 1, "the turn that was under way"


def test_the_pool_keeps_only_the_last_two_beats(heartbeat, recorder, p):
    one = heartbeat()
    one.begin_beats(ONE)
    for number in (NUM_BEAT_KEYS, 2 * NUM_BEAT_KEYS):
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
    time.sleep(5 * BEAT_INTERVAL_S)  # in which it would beat
    assert recorder.put_at == []
    first.begin_beats(ONE)
    first.end_beats(ONE)
    eventually(lambda: len(recorder.put_at) >= 3)


def begun(p):
    """A save whose first layers are done, and its hand-off."""
    keys = p.cache.keys(range(200))
    handoff, _ = p.cache.announce(keys)
    plan = SavePlan(keys, handoff=handoff, announce=Announcement(handoff, keys.num_tokens))
    save = p.pool.begin_save(plan, P_BLOCKS)
    save.layers_done(len(p.layout.held_layers))
    return save, handoff


def test_an_instance_that_does_not_publish_tells_nobody(instance, arena):
    p = instance(over=arena, publish=False)
    save, handoff = begun(p)
    save.job.wait(10)
    assert arena.match([handoff.started(p.namespace)]) == 0
    assert p.pool.abort_handoff(handoff).wait(10).reason is not None


ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
ALIVE_S = 2.5
"""For so long D waits for a P that only beats; without beats it would not."""

NUM_TOKENS = 200

P = """
import json, sys, time
from pdstore import SavePlan
from pdstore.store import open_store
from pdstore.format.plan import Announcement
from tests.support.kv import Instance, eventually, settings_of

store = open_store(sys.argv[1], settings_of())
p = Instance(store, layer_ranges=3)
keys = p.cache.keys(range(int(sys.argv[2])))
handoff, params = p.cache.announce(keys)
first = SavePlan(keys.prefix(64), announce=Announcement(handoff, keys.num_tokens))
save = p.pool.begin_save(first, range(20))
save.layers_done(len(p.layout.held_layers))
assert save.job.wait(10).reason is None
eventually(lambda: store.match([handoff.started(p.namespace)]))
save = p.pool.begin_save(SavePlan(keys, handoff=handoff), range(20))
print(json.dumps(params), flush=True)
time.sleep(600)
"""


@pytest.fixture(
    params=[
        "file",
        pytest.param("redis", marks=pytest.mark.nightly),
        pytest.param("shm", marks=pytest.mark.nightly),
    ]
)
def url(request, tmp_path):
    urls = {"file": f"file://{tmp_path}", "shm": f"shm://dead?size=8MiB&dir={tmp_path}"}
    if request.param in urls:
        yield urls[request.param]
    else:
        server = RedisServer(tmp_path)
        yield server.url
        server.stop()


@pytest.fixture
def d(url, closed_after):
    store = closed_after(open_store(url, settings_of()))
    return closed_after(Instance(store, POISON, layer_ranges=3, handoff_wait_s=DEADLINE_S))


def test_a_killed_p_costs_no_deadline(url, d):
    """D waits for the marker, follows P's answer, and follows a hand-off that a router named."""
    command = [sys.executable, "-c", P, url, str(NUM_TOKENS)]
    keys = d.cache.keys(range(NUM_TOKENS))
    with child(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        params = json.loads(p.stdout.readline())
        named = {"pdstore": {"attempt": params["pdstore"]["attempt"]}}
        waiting = [d.cache.lookup(keys, params)]
        for number, each in enumerate((params, named)):
            found = d.cache.follow(keys, each).wait(10)
            blocks = range(20 * number, 20 * number + 20)
            waiting.append(d.pool.load(found.keys, blocks, follow=found.follow))
        with pytest.raises(TimeoutError):
            waiting[0].wait(ALIVE_S)
        assert not any(job.done for job in waiting[1:])
        p.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        ended = [each.wait(DEADLINE_S / 2) for each in waiting]
        print(f"D stopped waiting {time.monotonic() - killed_at:.2f} s after P's death")
    assert {(each.reason, each.num_tokens) for each in ended} == {(Reason.HANDOFF_DEAD, 64)}
