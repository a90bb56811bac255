"""Why P and D do not meet: other pools and other weights."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from pdstore import PrefixCacheManager
from pdstore.errors import ConfigError, Reason
from pdstore.format.keys import POOL_ID_KEY
from pdstore.scheduler.mismatch import MismatchLog, PoolIdentity
from pdstore.store.base import Slots
from pdstore.store.connect import read_pool_id
from pdstore.store.memory import MemoryStore
from pdstore.testing.faulty import Faulty
from tests.support.kv import Instance, eventually, settings_of
from tests.support.states import NO_WINDOW, StateInstance

OTHER = "ab" * 16


@pytest.fixture
def store():
    return MemoryStore()


def test_the_store_is_asked_again_only_after_its_time(store):
    lasting, fleeting = PoolIdentity(store, age_s=60.0), PoolIdentity(store, age_s=0.0)
    for identity in (lasting, fleeting):
        identity.refresh()
    before = lasting.current
    store.remove([POOL_ID_KEY])
    assert lasting.refresh() > 0
    fleeting.refresh()
    assert lasting.current == before
    assert fleeting.current == read_pool_id(store) != before


def test_the_id_before_a_store_came_back_empty_counts_for_a_while_and_not_for_ever(store):
    lasting, fleeting = PoolIdentity(store, age_s=60.0), PoolIdentity(store, age_s=0.0)
    for identity in (lasting, fleeting):
        identity.refresh()
    before = lasting.current.hex()
    store.remove([POOL_ID_KEY])
    assert lasting.is_same(read_pool_id(store).hex())
    assert lasting.is_same(before)
    fleeting.refresh()
    assert not fleeting.is_same(before)


def test_a_store_that_errs_leaves_the_id_as_it_is_and_says_no_to_none(store):
    """P may have seen a pool that was replaced, where D cannot look now."""
    faulty = Faulty(store)
    identity = PoolIdentity(faulty, age_s=0.0)
    identity.refresh()
    before = identity.current
    faulty.error_rate = 1.0
    identity.refresh()
    assert identity.current == before
    assert identity.is_same(OTHER)
    faulty.error_rate = 0.0
    assert not identity.is_same(OTHER)


def test_a_pool_has_one_id_for_all_and_heals_a_damaged_one(store):
    first = read_pool_id(store)
    assert read_pool_id(store) == first
    store.remove([POOL_ID_KEY])
    store.put([POOL_ID_KEY], Slots(memoryview(bytearray(64)), 64, [0], [64]))
    healed = read_pool_id(store)
    assert healed != bytes(16)
    assert read_pool_id(store) == healed
    assert read_pool_id(MemoryStore()) != first


@pytest.mark.requirement("R-X-5", "nothing grows with clients or time")
def test_messages_are_forgotten_in_the_end(caplog):
    mismatches = MismatchLog(repeat_interval_s=60.0, interval_s=0.0)
    for i in range(65):
        mismatches.warn(f"message {i}")
    mismatches.warn("message 0")
    assert caplog.text.count("message 0\n") == 2


def test_two_different_messages_are_both_told_at_once_and_equal_ones_once(caplog):
    mismatches = MismatchLog()
    for message in ("the dtype differs", "the pool differs", "the dtype differs"):
        mismatches.warn(message)
        mismatches.warn(f"other tokens than {message}", about="other tokens")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["the dtype differs", "other tokens than the dtype differs", "the pool differs"]


def test_messages_that_peers_make_up_are_few_in_a_second_and_said_later(caplog):
    mismatches = MismatchLog(interval_s=60.0, max_lines=3)
    for i in range(100):
        mismatches.warn(f"message {i}")
    assert len(caplog.records) == 3
    soon = MismatchLog(interval_s=0.0, max_lines=1)
    for i in range(5):
        soon.warn(f"soon {i}")
    assert len(caplog.records) == 8


@pytest.mark.parametrize("theirs", [b"", b"1" * 16, b"2" * 16])
@pytest.mark.parametrize("ours", [b"", b"1" * 16])
def test_a_prompt_is_handed_over_only_between_weights_that_were_updated_alike(
    store, closed_after, caplog, theirs, ours
):
    p, d = (closed_after(Instance(store)) for _ in range(2))
    p.cache.use_weights(theirs)
    d.cache.use_weights(ours)
    keys = p.cache.keys(range(100))
    handoff, params = p.cache.announce(keys)
    p.pool.save(keys, list(range(1, 8)), handoff=handoff).wait(20)
    found = d.cache.lookup(d.cache.keys(range(100)), params).wait(20)
    is_alike = theirs == ours
    assert (found.num_tokens, found.reason) == ((100, None) if is_alike else (0, Reason.NAMESPACE))
    assert ("weights updated in place" in caplog.text) != is_alike
    alone = d.cache.lookup(d.cache.keys(range(100))).wait(20)
    assert alone.num_tokens == (100 if is_alike else 0), "without a hand-off as well"


def said_by_d(p, d, tokens=range(100)):
    """What D finds of a prompt that P hands over."""
    _, params = p.cache.announce(p.cache.keys(tokens))
    return d.cache.lookup(d.cache.keys(tokens), params).wait(20)


def test_engines_that_chose_other_blocks_for_their_states_are_told_both(
    store, closed_after, caplog
):
    p, d = (closed_after(StateInstance(store, block=block)) for block in (64, 128))
    assert said_by_d(p, d).reason is Reason.NAMESPACE
    assert "does not fit this one: block_tokens: 64 there, 128 here" in caplog.text


def test_states_of_equal_bytes_and_another_meaning_are_told(store, closed_after, caplog):
    conv, *others = NO_WINDOW
    layers = [dataclasses.replace(conv, form="float32 b"), *others]
    p, d = (closed_after(StateInstance(store, each)) for each in (NO_WINDOW, layers))
    assert said_by_d(p, d).reason is Reason.NAMESPACE
    assert "does not fit this one: form: " in caplog.text


@pytest.mark.parametrize("dropped", [0, 1])
def test_the_last_token_that_p_dropped_or_kept_is_no_sign_of_another_tokenizer(
    store, closed_after, caplog, dropped
):
    p, d = (closed_after(StateInstance(store)) for _ in range(2))
    theirs = range(300 - dropped)
    handoff, params = p.cache.announce(p.cache.keys(theirs))
    assert p.put(theirs, 256, handoff=handoff).reason is None
    found = d.cache.follow(d.cache.keys(range(300)), params).wait(20)
    assert (found.num_tokens, found.reason) == ((299, None) if dropped else (256, Reason.ABSENT))
    assert not caplog.records
    _, params = p.cache.announce(p.cache.keys(range(1, 300)))
    d.cache.follow(d.cache.keys(range(300)), params).cancel()
    assert "tokenizer or chat template differ" in caplog.text


@pytest.fixture
def with_files(store, closed_after):
    """Makes managers whose weights' files have a revision: `with_files(read, weights="w")`."""

    def make(weights_of, **changes):
        one, more = closed_after(Instance(store, **changes)), {"weights_of": weights_of}
        settings = settings_of(**changes)
        return closed_after(PrefixCacheManager(settings, one.namespace, store=store, **more))

    return make


def answer_of(p):
    """Returns the parameters of P's answer, once they have what a thread finds out."""
    p.announce(p.keys(range(9)))
    return eventually(lambda: _with_files(p.announce(p.keys(range(9)))[1]))


def _with_files(params):
    return params if "weights_files" in params["pdstore"] else None


@pytest.mark.misconfiguration("`PDSTORE_WEIGHTS` is equal on P and D, and the weights are not")
def test_equal_names_of_other_weights_are_one_warning_for_each_peer(with_files, caplog):
    ps = [with_files(lambda _: "sha256:" + "a" * 64, weights="prod") for _ in range(2)]
    d = with_files(lambda _: "sha256:" + "b" * 64, weights="prod")
    answers = [answer_of(p) for p in ps]
    answer_of(d)  # so that D knows its own

    def are_told():
        for params in answers * 3:
            d.lookup(d.keys(range(9)), params).cancel()
        return caplog.text.count("although PDSTORE_WEIGHTS is prod on both") == len(ps)

    eventually(are_told)
    assert "are sha256:aaaaaaaaaaaaaaaaa, those here are sha256:bbbbbbbbbbbbbbbbb" in caplog.text
    assert "Give each checkpoint a PDSTORE_WEIGHTS of its own, or unset it on both" in caplog.text


def test_nobody_waits_for_the_digest_of_the_weights(with_files):
    may_end = threading.Event()

    def slow(settings):
        assert may_end.wait(10)
        return "sha256:a"

    p = with_files(slow, weights="prod")
    _, params = p.announce(p.keys(range(9)))
    assert "weights_files" not in params["pdstore"]
    may_end.set()
    assert answer_of(p)["pdstore"]["weights_files"] == "sha256:a"


def test_weights_without_files_are_not_compared(with_files, caplog):
    is_asked = threading.Event()

    def no_files(settings):
        assert settings.weights is None
        is_asked.set()
        raise ConfigError("no weight files")

    p = with_files(no_files, weights="prod")
    assert is_asked.wait(10)
    p.close()  # the thread has ended
    assert _with_files(p.announce(p.keys(range(9)))[1]) is None
    assert not caplog.records
