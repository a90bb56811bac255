"""PrefixCacheManager: lookups, announcements, tenants, misconfigurations."""

from __future__ import annotations

import contextlib
import time

import pytest

import pdstore
from pdstore import PrefixCacheManager
from pdstore.errors import Reason
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import FORMAT_VERSION, Namespace, Part
from pdstore.format.plan import SavePlan
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.store.guard import GuardedStore
from pdstore.store.memory import MemoryStore
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import exit_code_of
from tests.support.kv import Instance, eventually, settings_of
from tests.support.pool_kit import save
from tests.support.states import StateInstance

BLOCKS = list(range(20))


def publish(p, tokens):
    keys = p.cache.keys(tokens)
    handoff, params = p.cache.announce(keys)
    return p.pool.save(keys, BLOCKS, handoff=handoff), params


def find(d, tokens, params=None, timeout_s=10.0):
    return d.cache.lookup(d.cache.keys(tokens), params).wait(timeout_s)


def misses(one, reason) -> float:
    name, labels = "pdstore_misses_total", {"reason": reason.value}
    return one.cache.metrics.registry.get_sample_value(name, labels) or 0.0


def test_the_metrics_tell_version_format_and_namespace(instance):
    cache = instance(role="decode").cache
    labels = {
        "version": pdstore.__version__,
        "format": str(FORMAT_VERSION),
        "role": "decode",
        "namespace": cache.namespace.hex,
        "store": "memory://",
    }
    shown = cache.metrics.registry.get_sample_value
    eventually(lambda: cache.pool_id)
    assert shown("pdstore_info", labels | {"pool": cache.pool_id.hex()}) == 1
    assert not shown("pdstore_info", labels | {"pool": ""})


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 150])
def test_a_prompt_that_is_a_token_longer_than_the_handed_over_one_finds_all_of_it(
    instance, num_tokens
):
    p, d = instance(), instance()
    save, params = publish(p, range(num_tokens))
    assert save.wait(10).reason is None
    keys = d.cache.keys(range(num_tokens + 1))
    for start in (d.cache.lookup, d.cache.follow):
        found = start(keys, params).wait(10)
        assert (found.num_tokens, found.reason) == (num_tokens, None)
    theirs = p.cache.keys(range(num_tokens))
    assert found.keys.store_keys(p.layout.parts) == theirs.store_keys(p.layout.parts)
    assert keys.num_tokens == num_tokens + 1


def test_a_store_that_hangs_is_a_miss_at_the_deadline(instance, store):
    faulty = Faulty(store)
    d = instance(over=faulty, lookup_timeout_s=0.05)
    eventually(lambda: d.cache.pool_id)
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


@pytest.mark.misconfiguration("`memory://` between processes")
def test_memory_of_another_process_is_called_what_it_is(instance, caplog):
    other = open_store("memory://", settings_of())
    p, d = instance(), instance(over=other)
    eventually(lambda: p.cache.pool_id)
    eventually(lambda: d.cache.pool_id)
    _, params = publish(p, range(100))
    find(d, range(100), params, 5)
    eventually(lambda: "memory:// is a pool of one process alone" in caplog.text)


def test_blocks_that_went_after_p_published_them_are_told(instance, caplog):
    p, d = instance(), instance()
    job, params = publish(p, range(100))
    job.wait(10)
    blocks = p.cache.keys(range(100)).store_keys(p.cache.namespace.parts)
    p.store.remove(blocks)
    assert find(d, range(100), params).reason is Reason.ABSENT
    eventually(lambda: "Look at the pool's size" in caplog.text)


@pytest.mark.misconfiguration("both instances have the role `decode`, or the roles are swapped")
@pytest.mark.misconfiguration("the router has P's and D's URL swapped")
def test_swapped_roles_are_told(instance, caplog):
    p, d = instance(role="prefill"), instance(role="decode")
    find(d, range(100), {"do_remote_decode": True})
    eventually(lambda: "start the prefill instance with PDSTORE_ROLE=prefill" in caplog.text)
    _, params = publish(p, range(100))
    caplog.clear()
    p.cache.announce(p.cache.keys(range(100)), params)
    assert "start the decode instance with PDSTORE_ROLE=decode" in caplog.text


def test_a_handoff_id_of_the_router_is_taken_over(instance):
    p, d = instance(), instance()
    params = {"pdstore": {"attempt": HandoffId.new().hex}}
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    keys = p.cache.keys(range(100))
    handoff, said = p.cache.announce(keys, params)
    assert said["pdstore"]["attempt"] == params["pdstore"]["attempt"]
    p.pool.save(keys, BLOCKS, handoff=handoff)
    assert eventually(lookup.poll).num_tokens == 100


@pytest.mark.parametrize(
    ("theirs", "ours", "shared"), [(100, 130, 64), (130, 100, 64), (64, 100, 64), (100, 64, 64)]
)
def test_who_follows_a_prompt_of_another_length_follows_the_whole_blocks_of_both(
    instance, theirs, ours, shared
):
    p, d = instance(), instance()
    _, params = p.cache.announce(p.cache.keys(range(theirs)))
    found = d.cache.follow(d.cache.keys(range(ours)), params).wait(10)
    assert (found.num_tokens, found.keys.num_tokens) == (shared, shared)
    assert found.reason is (None if shared == ours else Reason.ABSENT), "as for 0 tokens"
    assert found.follow is not None


@pytest.mark.parametrize(("theirs", "is_whole"), [(129, True), (130, True), (128, False)])
def test_a_lookup_that_finds_all_of_a_shorter_prompt_says_that_the_rest_is_absent(
    instance, theirs, is_whole
):
    p, d = instance(), instance()
    keys = p.cache.keys(range(theirs))
    handoff, params = p.cache.announce(keys)
    p.pool.save(keys, BLOCKS, handoff=handoff).wait(20)
    found = d.cache.lookup(d.cache.keys(range(130)), params).wait(10)
    assert found.num_tokens == theirs
    assert found.reason is (None if is_whole else Reason.ABSENT)
    assert misses(d, Reason.ABSENT) == (0 if is_whole else 1)


def test_who_follows_a_prompt_that_shares_no_block_gets_a_reason(instance):
    p, d = instance(), instance()
    _, params = p.cache.announce(p.cache.keys(range(10)))
    found = d.cache.follow(d.cache.keys(range(130)), params).wait(10)
    assert (found.num_tokens, found.reason, found.follow) == (0, Reason.ABSENT, None)


def test_a_read_only_instance_announces_nothing_to_wait_for(instance):
    p = instance(publish=False)
    assert p.cache.announce(p.cache.keys(range(100)))[1] == {}


def test_every_shard_must_be_done(instance, store):
    d = instance(kv_shards=2, handoff_wait_s=0.1)
    p = instance(kv_shards=2)
    job, params = publish(p, range(100))
    job.wait(10)
    handoff = HandoffId(params["pdstore"]["attempt"])
    store.remove([handoff.done(p.namespace, 1)])
    store.remove([p.cache.keys(range(100)).store_keys(p.layout.parts)[2]])
    found = find(d, range(100), params)
    assert (found.num_tokens, found.reason) == (64, Reason.HANDOFF_LATE)


def test_a_malformed_handoff_is_an_error_of_that_request(instance):
    d = instance()
    with pytest.raises(ValueError, match="attempt"):
        d.cache.lookup(d.cache.keys(range(10)), {"pdstore": {"attempt": "x"}})


def test_while_the_store_hangs_later_lookups_are_answered_at_once(instance, store):
    faulty = Faulty(store)
    d = instance(over=faulty, lookup_timeout_s=0.05)
    eventually(lambda: d.cache.pool_id)
    faulty.hold()
    assert find(d, range(100)).reason is Reason.DEADLINE
    eventually(lambda: d.cache.lookup(d.cache.keys(range(9))).poll())
    for _ in range(20):
        lookup = d.cache.lookup(d.cache.keys(range(9)))
        assert lookup.poll().reason is Reason.STORE_SLOW
    faulty.release()


@pytest.mark.parametrize("reason", [Reason.STORE_SLOW, Reason.DEADLINE])
def test_a_job_that_timed_out_makes_the_scheduler_ask_before_a_lookup_waits(
    instance, store, reason, closed_after
):
    """The worker has a breaker of its own, often in another process."""
    faulty = Faulty(store)
    guard = closed_after(GuardedStore(faulty, Metrics()))
    d = instance(over=guard, handoff_wait_s=30.0)
    eventually(lambda: d.cache.pool_id)
    faulty.hold()
    d.cache.note_job(reason)
    eventually(lambda: guard.is_open)
    start = time.monotonic()
    for params in (None, {"pdstore": {"attempt": "0" * 32}}):
        assert find(d, range(9), params).reason is Reason.STORE_DOWN
    assert time.monotonic() - start < 1.0
    faulty.release()
    eventually(lambda: find(d, range(9)).reason is Reason.ABSENT)


def test_p_says_that_it_will_not_store_while_its_own_store_does_not_answer(
    instance, store, closed_after
):
    faulty = Faulty(store)
    p = instance(over=closed_after(GuardedStore(faulty, Metrics())))

    def said():
        handoff, params = p.cache.announce(p.cache.keys(range(9)))
        assert handoff.last_save_failed == ("last_save" in params["pdstore"])
        return params["pdstore"].get("last_save")

    eventually(lambda: p.cache.pool_id)
    assert said() is None
    faulty.hold()
    p.cache.note_job(Reason.STORE_SLOW)
    eventually(lambda: said() == "store_down")
    faulty.release()
    eventually(lambda: said() is None)


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


def test_in_the_child_of_a_fork_every_verb_ends_at_once(instance):
    d = instance(handoff_wait_s=30.0)
    keys = d.cache.keys(range(9))
    waiting = d.cache.lookup(keys, {"pdstore": {"attempt": "0" * 32}})

    def child() -> bool:
        found = [d.cache.match(keys), d.cache.lookup(keys).poll()]
        waiting.cancel()
        d.cache.close()
        return all(each.reason is Reason.CLOSED for each in found)

    for _ in range(20):  # whatever the threads of the parent hold
        assert exit_code_of(child) == 0
    assert waiting.poll() is None


@pytest.mark.parametrize(
    ("role", "params", "expected"),
    [
        ("prefill", None, True),
        ("decode", {"do_remote_decode": True}, False),
        ("both", {"do_remote_decode": True}, True),
        ("both", {"do_remote_decode": False}, False),
        ("both", None, False),
    ],
)
def test_an_instance_publishes_prompts_by_its_role_and_the_request(
    instance, role, params, expected
):
    assert instance(role=role).cache.is_prefill(params) is expected


@pytest.mark.misconfiguration("`PDSTORE_LOAD=never` on a decode instance")
@pytest.mark.misconfiguration("`PDSTORE_PUBLISH=0` on a prefill instance")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"role": "decode", "load": "never"}, "PDSTORE_LOAD=never on a decode instance"),
        ({"role": "prefill", "publish": False}, "PDSTORE_PUBLISH=0 on a prefill instance"),
        ({"block_tokens": 8192}, "PDSTORE_BLOCK_TOKENS=8192, and most prompts have less"),
        ({}, "PDSTORE_BLOCK_TOKENS=64, and no prompt has over 32"),
    ],
)
def test_settings_that_leave_an_instance_without_use_are_told_at_the_start(
    store, caplog, changes, words
):
    settings, longest = settings_of(**changes), None if changes else 32
    namespace = Namespace({}, (Part(0, 0),), block_tokens=settings.block_tokens)
    PrefixCacheManager(settings, namespace, store=store, longest_prompt=longest).close()
    [said] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith(words)
    assert ": set PDSTORE_" in said


def test_an_answer_says_how_the_last_save_ended(instance):
    p = instance()

    def said(*reasons):
        p.cache.note_saves(reasons)
        handoff, params = p.cache.announce(p.cache.keys(range(9)))
        assert handoff.last_save_failed == ("last_save" in params["pdstore"])
        return params["pdstore"].get("last_save")

    assert said() is None
    assert said(None, Reason.STORE_FULL) == "store_full"
    no_news = (Reason.CANCELLED, Reason.CLOSED, Reason.NOT_ADMITTED)
    assert said(*no_news) == "store_full", "that says nothing of the store"
    assert said(None) is None


@pytest.mark.parametrize("reason", Reason)
def test_the_store_is_probed_after_jobs_for_which_it_was_too_slow(instance, monkeypatch, reason):
    guard = GuardedStore(MemoryStore(), Metrics())
    probes = []
    monkeypatch.setattr(guard, "doubt", lambda: probes.append(reason))
    instance(over=guard).cache.note_job(reason)
    assert bool(probes) is (reason in (Reason.STORE_SLOW, Reason.DEADLINE))


def test_a_handoff_after_a_save_that_fell_short_is_followed_once_p_has_begun_it(instance):
    p, d = (instance(layer_ranges=3, range_bytes=1, handoff_wait_s=30.0) for _ in "pd")
    eventually(lambda: p.cache.pool_id and d.cache.pool_id)
    p.cache.note_saves([Reason.STORE_FULL])
    keys = p.cache.keys(range(100))
    handoff, params = p.cache.announce(keys)
    given_up = d.cache.follow(d.cache.keys(range(100)), params).wait(10)
    assert (given_up.num_tokens, given_up.reason) == (0, Reason.HANDOFF_FAILED)
    save = p.pool.begin_save(SavePlan(keys, handoff=handoff), BLOCKS)
    save.layers_done(1)
    eventually(lambda: p.store.match([handoff.started(p.namespace)]) == 1)
    following = d.cache.follow(d.cache.keys(range(100)), params)
    assert following.wait(10).follow.hex == handoff.hex
    waiting = d.cache.lookup(d.cache.keys(range(100)), params)
    save.layers_done(len(p.layout.held_layers))
    assert waiting.wait(10).num_tokens == 100


@pytest.mark.parametrize("params", [None, {"pdstore": {"attempt": "0" * 32}}])
def test_of_a_prompt_of_one_token_nothing_is_asked_where_layers_keep_states(
    store, closed_after, params
):
    faulty = Faulty(store)
    d = closed_after(StateInstance(faulty, on_miss="fail", role="decode"))
    eventually(lambda: d.cache.pool_id)
    faulty.hold()
    found = d.cache.lookup(d.cache.keys([7]), params).poll()
    assert (found.num_tokens, found.reason) == (0, None), "it is computed in any case"
    faulty.release()


@pytest.mark.parametrize("num_tokens", [2, 64, 65, 129, 300])
def test_no_lookup_finds_the_last_token_where_layers_keep_states(store, closed_after, num_tokens):
    p, d = (closed_after(StateInstance(store)) for _ in range(2))
    for end, usable in ((num_tokens, 0), (num_tokens - 1, num_tokens - 1)):
        p.put(range(end))
        lookup = d.cache.lookup(d.cache.keys(range(num_tokens)), is_held=True)
        found = lookup.wait(10)
        assert found.num_tokens == usable
        lookup.serve(found)
        again = d.cache.look_again(lookup).wait(10)
        assert again.num_tokens == found.num_tokens


TOKENS = list(range(300))


class Listening(MemoryStore):
    """Keeps the calls that look for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def match(self, keys):
        self.asked.append(list(keys))
        return super().match(keys)


def test_no_key_of_one_tenant_is_a_key_of_another(closed_after):
    store = MemoryStore()
    tenants = [closed_after(Instance(store, salt=salt)) for salt in (None, "a", "b")]
    names = [set(one.cache.keys(TOKENS).store_keys(one.layout.parts)) for one in tenants]
    assert len(set.union(*names)) == sum(map(len, names))


def calls_of_a_lookup(other_has: list[int]) -> list[int]:
    """Returns the number of keys of each call of a lookup, while another has saved a prompt."""
    store = Listening()
    with (
        contextlib.closing(Instance(store, salt="theirs")) as other,
        contextlib.closing(Instance(store, salt="ours")) as ours,
    ):
        if other_has:
            save(other, other_has)
        store.asked.clear()
        keys = ours.cache.keys(TOKENS)
        assert ours.cache.match(keys).num_tokens == 0
        mine = set(keys.store_keys(ours.layout.parts))
        assert all(mine.issuperset(asked) for asked in store.asked)
        return [len(asked) for asked in store.asked]


@pytest.mark.requirement("C18", "a tenant cannot find out what another tenant has stored")
def test_a_tenants_lookups_do_not_depend_on_what_another_has_stored():
    assert calls_of_a_lookup(TOKENS) == calls_of_a_lookup([]) == calls_of_a_lookup(TOKENS[:70])
