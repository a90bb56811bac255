"""Hand-offs that a manager waits for: ended by markers, failure or time, each for itself."""

from __future__ import annotations

import time

import pytest

from pdstore import PrefixCacheManager
from pdstore.errors import Reason, StoreUnavailable
from pdstore.format.handoff import BEAT_TIMEOUT_S, HandoffId, beat_key
from pdstore.format.keys import Namespace, Part
from pdstore.scheduler.lookup import Lookup
from pdstore.store.base import Slots
from tests.store.test_watch import KeyByKey, Looked, Telling
from tests.support.kv import eventually, settings_of

NAMESPACE = Namespace({"n": 1}, (Part(0, 0), Part(0, 1)), block_tokens=4, num_shards=2)
STORES = [Looked, KeyByKey, Telling]


class Rig:
    """A manager over a store, and all that tests ask of it."""

    def __init__(self, store, lookup_timeout_s=1.0, **changes):
        self.store = store
        settings = settings_of(**{"handoff_wait_s": 30.0, **changes})
        self.cache = PrefixCacheManager(
            settings, NAMESPACE, store=store, lookup_timeout_s=lookup_timeout_s
        )
        self.keys = self.cache.keys(range(10))

    def lookup(self, handoff: HandoffId, *, follows=False, is_held=False, **said) -> Lookup:
        said = {"attempt": handoff.hex, **said}
        if handoff.instance:
            said["instance"] = handoff.instance
        start = self.cache.follow if follows else self.cache.lookup
        return start(self.keys, {"pdstore": said}, is_held=is_held)

    def sample(self, name: str, **labels) -> float:
        return self.cache.metrics.registry.get_sample_value(f"pdstore_{name}", labels) or 0.0

    def put(self, *keys):
        n = len(keys)
        self.store.put(list(keys), Slots(memoryview(bytearray(64)), 64, [0] * n, [8] * n))

    def put_done(self, handoff: HandoffId):
        self.put(handoff.done(NAMESPACE, 0), handoff.done(NAMESPACE, 1))

    def put_blocks(self):
        self.put(*self.keys.store_keys(NAMESPACE.parts))


@pytest.fixture
def rig(closed_after):
    def rig(store=None, **changes) -> Rig:
        made = Rig(store or Looked(), **changes)
        closed_after(made.cache)
        return made

    return rig


@pytest.mark.parametrize("store", STORES)
def test_a_lookup_ends_when_every_shard_is_done_and_not_before(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    one.put_blocks()
    lookup = one.lookup(handoff)
    one.put(handoff.done(NAMESPACE, 0))
    time.sleep(0.05)  # a window in which a wrong wait would answer
    assert lookup.poll() is None
    one.put(handoff.done(NAMESPACE, 1))
    assert (lookup.wait(10).num_tokens, lookup.wait(10).reason) == (10, None)
    assert one.sample("handoff_wait_seconds_count") == 1


@pytest.mark.parametrize("store", STORES)
def test_p_that_failed_ends_the_wait_with_what_is_there(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    one.put(*one.keys.store_keys(NAMESPACE.parts)[:4])
    lookup = one.lookup(handoff)
    one.put(handoff.failed(NAMESPACE))
    assert (lookup.wait(10).num_tokens, lookup.wait(10).reason) == (8, Reason.HANDOFF_FAILED)


@pytest.mark.parametrize("store", [Looked, Telling])
def test_a_lookup_that_follows_ends_when_p_has_started_and_no_other_does(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    waiting, following = one.lookup(handoff), one.lookup(handoff, follows=True)
    one.put(handoff.started(NAMESPACE))
    found = following.wait(10)
    assert (found.num_tokens, found.reason, found.follow) == (10, None, handoff)
    assert waiting.poll() is None
    one.put_done(handoff)
    assert waiting.wait(10).follow is None


@pytest.mark.parametrize("store", [Looked, Telling])
def test_a_hand_off_that_is_followed_is_searched_for_until_its_request_is_served(rig, store):
    one = rig(store())
    lookup = one.lookup(HandoffId.new(), follows=True, is_held=True, num_tokens=10)
    found = lookup.wait(10)
    assert found.follow is not None
    before = len(one.store.looks)
    eventually(lambda: len(one.store.looks) > before + 2)
    lookup.serve(found)
    before = len(one.store.looks)
    for number in range(10):
        one.put(f"block {number}")
        time.sleep(0.01)
    assert len(one.store.looks) <= before + 1, "at most the one that ran already"


def test_what_p_has_failed_to_save_is_promised_no_more_though_the_store_gives_no_answer(
    rig, monkeypatch
):
    def fail(keys):
        raise StoreUnavailable("away")

    one, handoff = rig(), HandoffId.new()
    lookup = one.lookup(handoff, follows=True, is_held=True, num_tokens=10)
    assert lookup.wait(10).follow is not None
    monkeypatch.setattr(one.store, "match", fail)
    one.put(handoff.failed(NAMESPACE))
    eventually(lambda: lookup.found.follow is None)
    assert (lookup.found.num_tokens, lookup.found.reason) == (0, Reason.HANDOFF_FAILED)


@pytest.mark.parametrize("store", STORES)
def test_a_p_whose_last_save_fell_short_and_shows_no_sign_is_waited_for_30_ms(rig, store):
    one, start = rig(store()), time.monotonic()
    assert one.lookup(HandoffId.new(), last_save="store_full").wait(10).reason
    assert 0.02 <= time.monotonic() - start < 1.0


@pytest.mark.parametrize(("said", "least_s"), [({}, 0.5), ({"last_save": "store_slow"}, 0.1)])
def test_a_wait_ends_when_its_store_call_hangs_and_sooner_if_p_could_not_store(rig, said, least_s):
    one = rig(lookup_timeout_s=0.1)
    eventually(lambda: one.cache.pool_id)
    one.store.released.clear()
    start = time.monotonic()
    found = one.lookup(HandoffId.new(), **said).wait(10)
    took_s = time.monotonic() - start
    one.store.released.set()
    assert found.reason is Reason.STORE_SLOW
    assert least_s <= took_s < 5.0, "not the 30 s for which P's marker may be waited for"


def test_after_a_call_that_hung_the_next_waits_are_asked_for_at_once(rig):
    one, handoff = rig(lookup_timeout_s=0.1), HandoffId.new()
    one.store.released.clear()
    assert one.lookup(HandoffId.new()).wait(10).reason is Reason.STORE_SLOW
    eventually(lambda: one.cache.lookup(one.keys).poll())  # the one after it does not wait at all
    one.put_blocks()
    one.put_done(handoff)
    one.store.released.set()
    eventually(lambda: one.lookup(handoff).wait(10).num_tokens == 10, 5.0)


def test_without_markers_the_wait_ends_at_its_time(rig):
    one = rig(handoff_wait_s=0.1)
    assert one.lookup(HandoffId.new()).wait(10).reason is Reason.HANDOFF_LATE


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("has_beaten", "reason"), [(True, Reason.HANDOFF_DEAD), (False, Reason.HANDOFF_GONE)]
)
def test_a_p_that_does_not_beat_is_dead_if_it_has_left_a_sign(rig, store, has_beaten, reason):
    one = rig(store())
    if has_beaten:
        one.put(beat_key(NAMESPACE, "d" * 32, 1))
    assert one.lookup(HandoffId.new("d" * 32)).wait(10).reason is reason


def test_a_p_that_beats_is_waited_for_until_it_stops(rig):
    one, begin = rig(), time.monotonic()
    lookup, number = one.lookup(HandoffId.new("a" * 32)), 0
    while time.monotonic() < begin + 2 * BEAT_TIMEOUT_S:
        one.put(beat_key(NAMESPACE, "a" * 32, number))
        one.store.remove([beat_key(NAMESPACE, "a" * 32, number - 2)])
        number += 1
        time.sleep(0.2)
    assert lookup.poll() is None
    assert lookup.wait(10).reason is Reason.HANDOFF_DEAD


def test_a_p_that_never_said_its_name_is_waited_for(rig):
    lookup = rig().lookup(HandoffId.new())
    with pytest.raises(TimeoutError):
        lookup.wait(BEAT_TIMEOUT_S + 0.5)


def test_all_waits_are_one_look_for_markers_only(rig):
    one = rig()
    handoffs = [HandoffId.new() for _ in range(50)]
    for handoff in [*handoffs, handoffs[0]]:
        one.lookup(handoff)
    first_shards = {handoff.done(NAMESPACE, 0) for handoff in handoffs}
    look = eventually(lambda: next((s for s in one.store.looks if first_shards <= set(s)), None))
    assert len(look) == len(set(look)) == 100
    assert all(":handoff:" in key for keys in one.store.looks for key in keys)


@pytest.mark.requirement("R1, R26", "one bad request harms no other request")
def test_whatever_a_store_raises_about_one_handoff_delays_no_other(rig):
    one, bad, good = rig(), HandoffId.new(), HandoffId.new()
    one.put_blocks()
    waiting = one.lookup(good)
    one.store.about, one.store.error = bad.hex, ValueError("a bug")
    assert one.lookup(bad).wait(0.9).reason is Reason.FAULT
    one.put_done(good)
    assert waiting.wait(0.9).reason is None


def test_another_pool_is_noticed_later_where_the_store_did_not_answer_at_first(rig, monkeypatch):
    def fail(keys, slots):
        raise StoreUnavailable("away")

    one = rig(handoff_wait_s=0.3)
    eventually(lambda: one.cache.pool_id)
    with monkeypatch.context() as patch:
        patch.setattr(one.store, "get", fail)
        lookup = one.lookup(HandoffId.new(), pool_id="ab" * 16)
        eventually(lambda: one.store.looks)
        time.sleep(0.05)
        assert lookup.poll() is None
    assert lookup.wait(10).reason is Reason.OTHER_POOL
