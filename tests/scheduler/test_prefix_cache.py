"""Lookups: answered in time whatever P, the store or the network does, and always with a reason."""

from __future__ import annotations

import time

import pytest

from pdstore import PrefixCacheManager
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import POOL_ID_KEY
from pdstore.outcome import Reason
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.connect import read_pool_id
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.faulty import Faulty
from pdstore.threads import Deadline
from tests.support.kv import Instance, eventually, settings_of

BLOCKS = list(range(20))


@pytest.fixture
def store():
    store = open_store("memory://", settings_of())
    yield store
    store.close()


@pytest.fixture
def instance(store):
    made = []

    def instance(over=None, **changes) -> Instance:
        made.append(Instance(over or store, **changes))
        return made[-1]

    yield instance
    for one in made:
        one.close()


def publish(p, tokens):
    keys = p.cache.keys(tokens)
    attempt, params = p.cache.announce(keys)
    return p.pool.save(keys, BLOCKS, handoff=attempt), params


def find(d, tokens, params=None, timeout_s=10.0):
    return d.cache.lookup(d.cache.keys(tokens), params).wait(timeout_s)


def misses(one, reason) -> float:
    name, labels = "pdstore_misses_total", {"reason": reason.value}
    return one.cache.metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_lookup_returns_at_once_and_finds_what_is_stored(instance):
    p, d = instance(), instance()
    publish(p, range(100))[0].wait(10)
    found = find(d, range(100))
    assert (found.num_tokens, found.reason) == (100, None)


def test_d_waits_for_p(instance):
    p, d = instance(), instance()
    keys = p.cache.keys(range(100))
    attempt, params = p.cache.announce(keys)
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    p.pool.save(keys.prefix(64), BLOCKS).wait(10)
    time.sleep(0.05)  # a window in which a wrong lookup would answer
    assert lookup.poll() is None
    p.pool.save(keys, BLOCKS, handoff=attempt)
    assert eventually(lookup.poll).num_tokens == 100


def test_p_that_dies_costs_d_its_deadline_and_what_is_durable_counts(instance):
    p, d = instance(), instance(handoff_wait_s=0.1)
    keys = p.cache.keys(range(100))
    _, params = p.cache.announce(keys)
    p.pool.save(keys.prefix(64), BLOCKS).wait(10)
    start = time.monotonic()
    found = find(d, range(100), params)
    assert time.monotonic() - start < 5
    assert (found.num_tokens, found.reason) == (64, Reason.HANDOFF_LATE)
    assert misses(d, Reason.HANDOFF_LATE) == 1


def test_a_store_that_hangs_is_a_miss_at_the_deadline(instance, store):
    faulty = Faulty(store)
    d = instance(over=faulty, lookup_wait_s=0.05)
    eventually(lambda: d.cache._pool_id)
    faulty.hold()
    start = time.monotonic()
    assert find(d, range(100)).reason is Reason.DEADLINE
    assert time.monotonic() - start < 2
    assert misses(d, Reason.DEADLINE) == 1
    faulty.release()


def test_a_store_that_is_down_is_a_miss_at_once(instance, store):
    p = instance()
    _, params = publish(p, range(100))
    faulty = Faulty(store, error_rate=1.0)
    d = instance(over=faulty, handoff_wait_s=30.0)
    assert find(d, range(100), params, 5).reason is Reason.STORE_DOWN
    assert d.cache.match(d.cache.keys(range(100))).reason is Reason.STORE_DOWN


def test_another_namespace_is_said_at_once_by_field(instance, caplog):
    p, d = instance(weights="v1"), instance(weights="v2", order="head", handoff_wait_s=30.0)
    _, params = publish(p, range(100))
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    assert lookup.poll().reason is Reason.NAMESPACE
    d.cache.lookup(d.cache.keys(range(100)), params)
    assert 'weights: "v1" there, "v2" here' in caplog.text
    assert "order" in caplog.text
    assert caplog.text.count("does not fit") == 1


def test_another_pool_is_said_at_once(instance, caplog):
    other = open_store("memory://", settings_of())
    p, d = instance(), instance(over=other, handoff_wait_s=30.0)
    eventually(lambda: p.cache._pool_id)
    eventually(lambda: d.cache._pool_id)
    _, params = publish(p, range(100))
    assert find(d, range(100), params, 5).reason is Reason.OTHER_POOL
    assert "PDSTORE_STORE" in caplog.text


def test_a_store_that_came_back_empty_is_still_the_pool_of_a_p_that_has_not_noticed(
    instance, store
):
    p, d = instance(), instance(handoff_wait_s=30.0)
    eventually(lambda: p.cache._pool_id)
    eventually(lambda: d.cache._pool_id)
    store.remove([POOL_ID_KEY])
    new = read_pool_id(store)
    d.cache._pool_id_deadline = Deadline(0.0)
    find(d, range(50))
    assert d.cache._pool_id == new
    _, params = publish(p, range(100))
    assert params["pdstore"]["pool_id"] != new.hex()
    assert find(d, range(100), params, 5).num_tokens == 100
    d.cache._former_pool_id_deadline = Deadline(0.0)
    assert find(d, range(100), params, 5).reason is Reason.OTHER_POOL


def test_a_pool_has_one_id_for_all_and_heals_a_damaged_one(store):
    first = read_pool_id(store)
    assert read_pool_id(store) == first
    store.remove([POOL_ID_KEY])
    store.put([POOL_ID_KEY], Slots(memoryview(bytearray(64)), 64, [0], [64]))
    healed = read_pool_id(store)
    assert healed != bytes(16)
    assert read_pool_id(store) == healed
    other = open_store("memory://", settings_of())
    assert read_pool_id(other) != first


def test_an_attempt_of_the_router_is_taken_over(instance):
    p, d = instance(), instance()
    params = {"pdstore": {"attempt": HandoffId.new().hex}}
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    keys = p.cache.keys(range(100))
    attempt, said = p.cache.announce(keys, params)
    assert said["pdstore"]["attempt"] == params["pdstore"]["attempt"]
    p.pool.save(keys, BLOCKS, handoff=attempt)
    assert eventually(lookup.poll).num_tokens == 100


def test_a_read_only_instance_announces_nothing_to_wait_for(instance):
    p = instance(publish=False)
    assert p.cache.announce(p.cache.keys(range(100)))[1] == {}


def test_every_shard_must_be_done(instance, store):
    d = instance(kv_shards=2, handoff_wait_s=0.1)
    p = instance(kv_shards=2)
    job, params = publish(p, range(100))
    job.wait(10)
    attempt = HandoffId(params["pdstore"]["attempt"])
    store.remove([attempt.done(p.namespace, 1)])
    store.remove([p.cache.keys(range(100)).store_keys(p.layout.parts)[2]])
    found = find(d, range(100), params)
    assert (found.num_tokens, found.reason) == (64, Reason.HANDOFF_LATE)


def test_waiting_asks_for_markers_only(instance, store):
    class Watched(WrapperStore):
        def __init__(self, store):
            super().__init__(store)
            self.asked = []

        def match(self, keys):
            self.asked.extend(keys)
            return super().match(keys)

    watched = Watched(store)
    d = instance(over=watched, handoff_wait_s=0.2)
    eventually(lambda: d.cache._pool_id)
    watched.asked.clear()
    lookup = d.cache.lookup(d.cache.keys(range(200)), {"pdstore": {"attempt": HandoffId.new().hex}})
    while lookup.poll() is None:
        blocks = [k for k in watched.asked if ":handoff:" not in k]
        if lookup.poll() is None:
            assert blocks == []
    assert 2 <= len(watched.asked) <= 250


def test_a_malformed_handoff_is_an_error_of_that_request(instance):
    d = instance()
    with pytest.raises(ValueError, match="attempt"):
        d.cache.lookup(d.cache.keys(range(10)), {"pdstore": {"attempt": "x"}})


def test_waiting_for_a_lookup_is_bounded(instance):
    d = instance(handoff_wait_s=30.0)
    lookup = d.cache.lookup(d.cache.keys(range(10)), {"pdstore": {"attempt": "0" * 32}})
    with pytest.raises(TimeoutError):
        lookup.wait(0.01)


def test_a_cancelled_lookup_ends(instance):
    d = instance(handoff_wait_s=30.0)
    lookup = d.cache.lookup(d.cache.keys(range(10)), {"pdstore": {"attempt": "0" * 32}})
    lookup.cancel()
    assert lookup.poll().reason is Reason.CANCELLED
    eventually(lambda: not d.cache._lookups)


def test_while_the_store_hangs_later_lookups_are_answered_at_once(instance, store):
    faulty = Faulty(store)
    d = instance(over=faulty, lookup_wait_s=0.05)
    eventually(lambda: d.cache._pool_id)
    faulty.hold()
    assert find(d, range(100)).reason is Reason.DEADLINE
    eventually(lambda: d.cache.lookup(d.cache.keys(range(9))).poll())
    lookup = d.cache.lookup(d.cache.keys(range(9)))
    assert lookup.poll().reason is Reason.STORE_SLOW
    assert len(d.cache._lookups) <= 2
    faulty.release()


def test_a_fault_in_one_lookup_costs_no_other_its_answer(instance, store):
    class Odd(WrapperStore):
        def match(self, keys):
            if any(self.odd in key for key in keys):
                raise RuntimeError("a bug")
            return super().match(keys)

        odd = "nothing"

    odd = Odd(store)
    p, d = instance(), instance(over=odd, lookup_wait_s=10.0)
    for i in range(3):
        publish(p, [i, *range(99)])[0].wait(10)
    keys = [d.cache.keys([i, *range(99)]) for i in range(3)]
    odd.odd = keys[1].hash_of(0).hex()
    lookups = [d.cache.lookup(k) for k in keys]
    found = [lookup.wait(5) for lookup in lookups]
    assert [f.num_tokens for f in found] == [100, 0, 100]
    assert found[1].reason is Reason.FAULT


def test_many_lookups_at_once_are_all_answered(instance):
    p, d = instance(), instance(handoff_wait_s=10.0)
    lookups = []
    for i in range(40):
        _, params = publish(p, [i, *range(99)])
        lookups.append(d.cache.lookup(d.cache.keys([i, *range(99)]), params))
    assert [eventually(lookup.poll).num_tokens for lookup in lookups] == [100] * 40


def test_close_ends_waiting_lookups(store):
    one = Instance(store)
    manager = PrefixCacheManager(one.settings, one.namespace, store=store)
    lookup = manager.lookup(manager.keys(range(9)), {"pdstore": {"attempt": "0" * 32}})
    manager.close()
    manager.close()
    assert lookup.poll().reason is Reason.CLOSED
    assert manager.lookup(manager.keys(range(9))).poll().reason is Reason.CLOSED
    one.close()


def test_clear_forgets_this_namespace_for_all_and_no_other(instance):
    p, d, other = instance(), instance(), instance(weights="other")
    for one in (p, other):
        publish(one, range(100))[0].wait(10)
    assert find(d, range(100)).num_tokens == 100
    assert d.cache.clear() is True
    assert [find(one, range(100)).num_tokens for one in (p, d, other)] == [0, 0, 100]
    publish(p, range(100))[0].wait(10)
    assert find(d, range(100)).num_tokens == 100, "and it goes on from nothing"


def test_clear_forgets_the_markers_too(instance):
    p, d = instance(), instance(handoff_wait_s=0.1)
    job, params = publish(p, range(100))
    job.wait(10)
    assert p.cache.clear()
    assert find(d, range(100), params).reason is Reason.HANDOFF_LATE


def test_clear_says_when_the_store_did_not_do_it(instance, store, caplog):
    p, faulty = instance(), Faulty(store)
    publish(p, range(100))[0].wait(10)
    d = instance(over=faulty)
    faulty.error_rate = 1.0
    assert d.cache.clear() is False
    assert f"namespace {d.namespace.hex} is not cleared" in caplog.text
    assert "clear failed on purpose" in caplog.text
    faulty.error_rate = 0.0
    assert find(d, range(100)).num_tokens == 100
    assert d.cache.clear() is True
