"""HandoffWatcher: all hand-offs in one call, ended by markers, failure or time, each for itself."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.format.handoff import SILENCE_S, Handoff, HandoffId, beat_key
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.scheduler.handoff_watcher import HandoffWatcher
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.pace import Pace
from pdstore.scheduler.pool_identity import PoolIdentity
from pdstore.scheduler.rates import PrefillRate
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from tests.support.kv import eventually

NAMESPACE = Namespace({"n": 1}, (Part(0, 0), Part(0, 1)), block_tokens=4, num_shards=2)
KEYS = PromptKeys(NAMESPACE).extend(range(10))
LONG = PromptKeys(NAMESPACE).extend(range(400))


class CountingStore(MemoryStore):
    """Counts searches, and raises what it is told to."""

    def __init__(self):
        super().__init__()
        self.searches: list[list[str]] = []
        self.error: BaseException | None = None
        self.about = ""  # the error is raised for keys with this in them

    def which_stored(self, keys):
        self.searches.append(list(keys))
        if self.error is not None and any(self.about in key for key in keys):
            raise self.error
        return super().which_stored(keys)


class KeyByKeyStore(WrapperStore):
    """Has no search for many keys; counts its matches."""

    def __init__(self):
        super().__init__(MemoryStore())
        self.num_matches = 0

    def match(self, keys):
        self.num_matches += 1
        return super().match(keys)


class TellingStore(CountingStore):
    """Says when something was put, as an arena or files can."""

    def __init__(self):
        super().__init__()
        self._changed = threading.Condition()
        self._number = self.num_hearing = 0

    def put(self, keys, slots):
        count = super().put(keys, slots)
        with self._changed:
            self._number += 1
            self._changed.notify_all()
        return count

    def wait_for_change(self, seen, timeout_s):
        with self._changed:
            self.num_hearing += seen == self._number
            self._changed.wait_for(lambda: seen != self._number, timeout_s)
            return self._number


STORES = [CountingStore, KeyByKeyStore, TellingStore]


class Rig:
    """A watcher over a store, and all that tests ask of it."""

    def __init__(self, store, **options):
        self.store, self.matched, self.others = store, [], []
        self.pace = PrefillRate()
        self.metrics = Metrics()
        self.identity = PoolIdentity(store)
        self.watcher = HandoffWatcher(
            store,
            NAMESPACE,
            self.metrics,
            self.identity,
            self.find,
            patience_s=1.0,
            on_other_pool=self.others.append,
            pace_of_p=self.pace,
            **options,
        )

    def find(self, keys, because):
        self.matched.append(because)
        return Match(keys, keys.num_tokens, because)

    def wait_for(self, handoff: HandoffId, wait_s=30.0, pool_id=None, follows=False) -> Lookup:
        offer = Handoff(handoff, pool_id=pool_id)
        lookup = Lookup(KEYS, offer, wait_s, lambda found: None, follows=follows)
        self.watcher.add(lookup)
        return lookup

    def start_both(self, handoff: HandoffId, wait_s=30.0) -> Lookup:
        """Asks for a long prompt that loads at once; P has started with it."""
        lookup = Lookup(
            LONG, Handoff(handoff), wait_s, lambda found: None, follows=True, load_s=0.0
        )
        self.watcher.add(lookup)
        self.put(handoff.started(NAMESPACE))
        return lookup

    def num_follows(self, because: str) -> float:
        value = self.metrics.registry.get_sample_value
        return value("pdstore_follows_total", {"because": because}) or 0.0

    def put(self, *keys):
        self.store.put(
            list(keys), Slots(memoryview(bytearray(64)), 64, [0] * len(keys), [8] * len(keys))
        )

    def put_done(self, handoff: HandoffId):
        self.put(handoff.done(NAMESPACE, 0), handoff.done(NAMESPACE, 1))


@pytest.fixture
def rig():
    rigs = []

    def rig(store=None, **options) -> Rig:
        rigs.append(Rig(store or CountingStore(), **options))
        return rigs[-1]

    yield rig
    for each in rigs:
        each.watcher.close()


@pytest.mark.parametrize("store", STORES)
def test_a_lookup_ends_when_every_shard_is_done_and_not_before(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    lookup = one.wait_for(handoff)
    one.put(handoff.done(NAMESPACE, 0))
    time.sleep(0.05)  # a window in which a wrong watcher would answer
    assert lookup.poll() is None
    one.put(handoff.done(NAMESPACE, 1))
    assert lookup.wait(10).reason is None
    assert one.metrics.registry.get_sample_value("pdstore_handoff_wait_seconds_count") == 1


@pytest.mark.parametrize("store", STORES)
def test_p_that_failed_ends_the_wait(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    lookup = one.wait_for(handoff)
    one.put(handoff.failed(NAMESPACE))
    assert lookup.wait(10).reason is Reason.HANDOFF_FAILED


@pytest.mark.parametrize("store", [CountingStore, TellingStore])
def test_a_lookup_that_follows_ends_when_p_has_started_and_no_other_does(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    waiting, following = one.wait_for(handoff), one.wait_for(handoff, follows=True)
    one.put(handoff.started(NAMESPACE))
    found = following.wait(10)
    assert (found.num_tokens, found.reason, found.follow) == (10, None, handoff)
    assert waiting.poll() is None
    one.put_done(handoff)
    assert waiting.wait(10).follow is None


def test_a_lookup_that_follows_takes_no_blocks_while_p_computes_for_long(rig):
    one, handoff = rig(), HandoffId.new()
    one.pace.note_step([(0, 400)], 3600.0)
    lookup = one.start_both(handoff)
    with pytest.raises(TimeoutError):
        lookup.wait(0.3)
    one.put(*LONG.store_keys([Part(0, 0)])[-1:])
    assert lookup.wait(10).follow == handoff
    assert one.num_follows("last_block") == 1


@pytest.mark.parametrize("store", [CountingStore, TellingStore])
def test_the_first_hand_off_shows_how_long_p_computes(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    assert one.start_both(handoff).wait(10).follow == handoff
    assert one.num_follows("unknown") == 1
    last = LONG.store_keys([Part(0, 0)])[-1]
    eventually(lambda: any(last in keys for keys in list(one.store.searches)))
    one.put(*LONG.store_keys([Part(0, 1)]))
    eventually(lambda: one.pace.is_known(0, 400))


def test_a_p_that_computes_longer_than_d_may_wait_is_followed_from_then_on(rig):
    one, handoff = rig(), HandoffId.new()
    one.pace.note_step([(0, 400)], 3600.0)
    assert one.start_both(handoff, wait_s=0.3).wait(10).follow == handoff
    assert one.num_follows("deadline") == 1


@pytest.mark.parametrize(("ending", "reason"), [("done", None), ("failed", Reason.HANDOFF_FAILED)])
def test_a_lookup_that_follows_is_matched_when_nothing_more_will_come(rig, ending, reason):
    one, handoff = rig(), HandoffId.new()
    lookup = one.wait_for(handoff, follows=True)
    one.put_done(handoff) if ending == "done" else one.put(handoff.failed(NAMESPACE))
    found = lookup.wait(10)
    assert (found.reason, found.follow) == (reason, None)
    assert one.matched == [reason]


@pytest.mark.parametrize("store", STORES)
def test_a_p_that_has_answered_is_followed_when_one_rank_is_done_and_another_is_not(rig, store):
    one, handoff = rig(store()), HandoffId.new()
    one.put(handoff.done(NAMESPACE, 0))
    lookup = Lookup(KEYS, Handoff(handoff, num_tokens=10), 30.0, lambda found: None, follows=True)
    one.watcher.add(lookup)
    assert lookup.wait(10).follow == handoff


def test_without_markers_the_wait_ends_at_its_time_with_what_is_there(rig):
    one = rig()
    found = one.wait_for(HandoffId.new(), wait_s=0.1).wait(10)
    assert (found.num_tokens, found.reason) == (10, Reason.HANDOFF_LATE)
    eventually(lambda: len(one.watcher) == 0)


@pytest.mark.parametrize("store", [CountingStore, KeyByKeyStore, TellingStore])
def test_a_p_that_does_not_beat_is_dead(rig, store):
    found = rig(store()).wait_for(HandoffId.new("d" * 32)).wait(10)
    assert (found.num_tokens, found.reason) == (10, Reason.HANDOFF_DEAD)


def test_a_p_that_beats_is_waited_for_until_it_stops(rig):
    one, begin = rig(), time.monotonic()
    lookup, number = one.wait_for(HandoffId.new("a" * 32)), 0
    while time.monotonic() < begin + 2 * SILENCE_S:
        one.put(beat_key(NAMESPACE, "a" * 32, number))
        one.store.remove([beat_key(NAMESPACE, "a" * 32, number - 2)])
        number += 1
        time.sleep(0.2)
    assert lookup.poll() is None
    assert lookup.wait(10).reason is Reason.HANDOFF_DEAD


def test_a_p_that_never_said_its_name_is_waited_for(rig):
    one = rig()
    lookup = one.wait_for(HandoffId.new())
    with pytest.raises(TimeoutError):
        lookup.wait(SILENCE_S + 0.5)


def test_all_waits_are_one_search_for_markers_only(rig):
    one = rig()
    handoffs = [HandoffId.new() for _ in range(50)]
    for handoff in [*handoffs, handoffs[0]]:
        one.wait_for(handoff)
    first_shards = {handoff.done(NAMESPACE, 0) for handoff in handoffs}
    search = eventually(
        lambda: next((s for s in list(one.store.searches) if first_shards <= set(s)), None)
    )
    assert len(search) == len(set(search)) in (50, 100)
    assert all(":handoff:" in key for keys in one.store.searches for key in keys)
    assert one.matched == []


def test_a_thousand_waits_are_at_most_200_calls_a_second(rig):
    one = rig()
    for _ in range(1000):
        one.wait_for(HandoffId.new())
    eventually(lambda: len(one.store.searches) > 3)
    start, before = time.monotonic(), len(one.store.searches)
    time.sleep(0.5)
    num_searches = len(one.store.searches) - before
    assert 1 <= num_searches <= 200 * (time.monotonic() - start) + 25


def test_a_store_without_the_search_is_asked_at_most_200_times_a_second(rig):
    one = rig(KeyByKeyStore())
    for _ in range(1000):
        one.wait_for(HandoffId.new())
    eventually(lambda: one.store.num_matches > 3)
    start, before = time.monotonic(), one.store.num_matches
    time.sleep(0.5)
    assert one.store.num_matches - before <= 200 * (time.monotonic() - start) + 25
    eventually(lambda: one.store.num_matches > before)


def test_a_store_that_errs_ends_the_waits_at_once(rig):
    one = rig()
    lookups = [one.wait_for(HandoffId.new()) for _ in range(3)]
    one.store.error = StoreUnavailable("away")
    assert [lookup.wait(10).reason for lookup in lookups] == [Reason.STORE_DOWN] * 3


class Stray(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("a bug"), Stray("a panic")])
def test_whatever_a_store_raises_about_one_handoff_delays_no_other(rig, error):
    one, bad, good = rig(), HandoffId.new(), HandoffId.new()
    waiting = one.wait_for(good)
    one.store.about, one.store.error = bad.hex, error
    assert one.wait_for(bad).wait(0.9).reason is Reason.FAULT
    one.put_done(good)
    assert waiting.wait(0.9).reason is None


def test_an_impossible_answer_of_a_store_is_an_error_of_the_store(rig, monkeypatch):
    one = rig()
    monkeypatch.setattr(one.store, "which_stored", lambda keys: [1] * len(keys))
    assert one.wait_for(HandoffId.new()).wait(10).reason is Reason.STORE_ERROR


def test_a_cancelled_lookup_is_no_longer_looked_for(rig):
    one = rig()
    lookup = one.wait_for(HandoffId.new())
    eventually(lambda: one.store.searches)
    lookup.cancel()
    eventually(lambda: len(one.watcher) == 0)
    assert one.matched == []


def test_another_pool_is_not_waited_for(rig):
    one = rig()
    eventually(lambda: one.identity.current)
    lookup = one.wait_for(HandoffId.new(), pool_id="ab" * 16)
    assert lookup.wait(10).reason is Reason.OTHER_POOL
    assert len(one.others) == 1


def test_another_pool_is_noticed_later_where_the_store_did_not_answer_at_first(rig, monkeypatch):
    def fail(keys, slots):
        raise StoreUnavailable("away")

    one = rig()
    eventually(lambda: one.identity.current)
    with monkeypatch.context() as patch:
        patch.setattr(one.store, "get", fail)
        lookup = one.wait_for(HandoffId.new(), wait_s=0.3, pool_id="ab" * 16)
        eventually(lambda: one.store.searches)
    assert lookup.wait(10).reason is Reason.OTHER_POOL
    assert one.matched == [Reason.OTHER_POOL]
    assert len(one.others) == 1


def test_a_store_that_tells_is_asked_at_its_changes(rig):
    one, handoff = rig(TellingStore(), pace=Pace(last_s=600.0, growth=1e6)), HandoffId.new()
    lookup = one.wait_for(handoff)
    eventually(lambda: one.store.num_hearing and len(one.store.searches) >= 2)  # now it rests
    one.put_done(handoff)
    assert lookup.wait(10).reason is None


def test_close_ends_the_waits(rig):
    one = rig()
    lookups = [one.wait_for(HandoffId.new()) for _ in range(3)]
    one.watcher.close()
    assert [lookup.wait(0.0).reason for lookup in lookups] == [Reason.CLOSED] * 3
