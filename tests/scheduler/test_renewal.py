"""Renewals: an answer that waits is looked up again, and no new lookup waits for that."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore.errors import Reason, StoreUnavailable
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import Namespace, Part, PromptKeys
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.renewal import MAX_AGE_S, Renewals
from pdstore.store.memory import MemoryStore
from tests.support.kv import eventually

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
LEASE_S = 0.2


def keys_of(first: int) -> PromptKeys:
    return PromptKeys(NAMESPACE).extend(range(first, first + 10))


class Rig:
    """Renewals of a store that has no values; what the lookups find is made up."""

    def __init__(self, lease_s=LEASE_S):
        self.found = Match(keys_of(0), 10, None)  # what each renewal finds
        self.asked: list[PromptKeys] = []
        self.counted: list[Match] = []
        self.is_busy = False
        self.gate = threading.Event()
        self.gate.set()
        self.renewals = Renewals(MemoryStore(lease_s=lease_s), self._find, lambda: self.is_busy)

    def _find(self, keys, because):
        self.asked.append(keys)
        self.gate.wait(20)
        return self.found

    def waiting(self, found=None, handoff=None, first=0) -> Lookup:
        """A lookup that has this answer, and waits with it."""
        keys = keys_of(first)
        lookup = Lookup(keys, handoff, 30.0, self.counted.append, hold=self.renewals.add)
        lookup.finish(found or Match.miss(keys, Reason.ABSENT))
        return lookup

    def close(self):
        self.gate.set()
        self.renewals.close()


@pytest.fixture
def rig(closed_after):
    return lambda **more: closed_after(Rig(**more))


def test_an_answer_is_renewed_until_it_is_served_and_counted_once(rig):
    one = rig()
    lookup = one.waiting()
    eventually(lambda: lookup.found is one.found and len(one.asked) > 2)
    assert one.counted == []
    lookup.serve(lookup.found)
    eventually(lambda: not len(one.renewals))
    num_asked = len(one.asked)
    time.sleep(LEASE_S)  # a window in which a wrong renewal would come
    lookup.serve(lookup.found)
    lookup.cancel()
    assert (len(one.asked), one.counted) == (num_asked, [one.found])


def test_an_answer_is_renewed_before_a_third_of_its_lease_is_over(rig):
    one = rig(lease_s=1.5)
    lookup = one.waiting()
    began = time.monotonic()
    eventually(lambda: lookup.found is one.found)
    assert time.monotonic() - began > 0.3
    assert rig(lease_s=6.0).renewals.interval_s < 2.0
    for lease_s in (0.0, 3600.0):
        assert 0 < rig(lease_s=lease_s).renewals.interval_s < MAX_AGE_S, "others save meanwhile"


def test_a_lookup_that_was_cancelled_counts_its_last_answer_and_is_forgotten(rig):
    one = rig()
    lookup = one.waiting()
    eventually(lambda: lookup.found is one.found)
    lookup.cancel()
    assert one.counted == [one.found]
    eventually(lambda: not len(one.renewals))


@pytest.mark.parametrize("reason", [Reason.NAMESPACE, Reason.OTHER_POOL, Reason.CLOSED])
def test_an_answer_that_nothing_changes_is_not_renewed(rig, reason):
    one = rig()
    one.waiting(Match.miss(keys_of(0), reason))
    assert not len(one.renewals)


def test_what_arrived_first_is_renewed_first(rig):
    one = rig(lease_s=3.0)
    one.is_busy = True
    lookups = [one.waiting(first=first) for first in (0, 100, 200)]
    lookups[1].started_at -= 10.0
    time.sleep(one.renewals.interval_s)  # all are due
    one.is_busy = False
    eventually(lambda: len(one.asked) >= 3)
    asked = [keys.hash_of(0) for keys in one.asked[:3]]
    assert asked == [lookups[n].keys.hash_of(0) for n in (1, 0, 2)]


def test_renewals_wait_for_new_lookups_until_an_answer_is_as_old_as_it_may_get(rig):
    one = rig(lease_s=3.0)
    one.is_busy = True  # as if a new lookup hung for ever
    lookup = one.waiting()
    began = time.monotonic()
    eventually(lambda: lookup.found is one.found)
    assert time.monotonic() - began > 0.95, "a third of the lease"


def test_a_store_that_fails_leaves_the_answer_as_it_was(rig):
    one = rig()
    whole, one.found = one.found, Match.miss(keys_of(0), Reason.STORE_DOWN, StoreUnavailable("x"))
    lookup = one.waiting(whole)
    eventually(lambda: len(one.asked) > 2)
    assert lookup.found is whole


def test_an_answer_to_follow_stays_until_all_of_it_is_stored(rig):
    one, keys = rig(), keys_of(0)
    followed = Match.following(keys, Handoff(HandoffId.new(), num_tokens=10))
    whole, one.found = one.found, Match(keys.prefix(8), 8, Reason.ABSENT)
    lookup = one.waiting(followed)
    eventually(lambda: len(one.asked) > 2)
    assert lookup.found is followed
    one.found = whole
    eventually(lambda: lookup.found is whole)
    assert not lookup.is_followed


def test_close_ends_a_renewal_that_hangs_and_leaves_nothing(rig):
    one = rig()
    one.gate.clear()
    lookup = one.waiting()
    before = lookup.found
    eventually(lambda: one.asked)
    one.renewals.close(0.0)
    assert not len(one.renewals)
    assert lookup.found is before
    one.waiting()
    assert not len(one.renewals), "after the end nothing is renewed"
