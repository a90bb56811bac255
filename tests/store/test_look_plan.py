"""LookPlan: a look is for what changed, and a round for the rest, however many keys there are."""

from __future__ import annotations

import pytest

from pdstore.store.look_plan import LookPlan
from tests.support.clock import Clock

FAILED = ["failed"]


class Naming:
    """A store as far as a plan asks about it."""

    def __init__(self, *, hears_all: bool):
        self.hears_all = hears_all

    def wait_for_change(self, seen, timeout_s): ...
    def keys_since(self, seen): ...


FILES, ARENA = Naming(hears_all=False), Naming(hears_all=True)


class Rig:
    """A plan for many keys, on a clock that a test moves."""

    def __init__(self, num_keys: int, teller=None):
        self.keys, self.clock = [f"key {n}" for n in range(num_keys)], Clock()
        self.plan = LookPlan(self.wanted, teller, clock=self.clock)

    def wanted(self, with_failed):
        return self.keys + (FAILED if with_failed else [])

    def look(self, found=()):
        self.plan.named()
        keys = self.plan.next()
        return keys, self.plan.note(set(found))

    def end_round(self):
        while self.plan.remaining_s == 0:
            self.look()


@pytest.fixture
def rig():
    """A plan for a thousand keys of a store that names changes, behind its first round."""
    rig = Rig(1000, FILES)
    rig.end_round()
    return rig


def test_what_the_store_names_is_told_once_and_not_looked_for(rig):
    rig.plan.tell(["key 7", "another"])
    rig.plan.tell(["failed"])
    assert rig.plan.remaining_s == 0
    assert rig.plan.named() == {"key 7", "another", "failed"}
    assert rig.plan.named() == set()
    assert rig.look()[0] == []


def test_a_key_that_is_new_is_looked_for_at_once(rig):
    rig.plan.ask(["new"])
    assert rig.look()[0] == ["new"]


def test_news_of_anything_is_a_round_through_all_keys_in_pieces(rig):
    rig.plan.tell(None)
    looks = [rig.look() for _ in range(4)]
    assert {key for keys, _ in looks for key in keys} >= set(rig.keys)
    assert max(len(keys) for keys, _ in looks) <= 256
    assert rig.look()[0] == []


def test_news_of_anything_during_a_round_is_a_round_after_it(rig):
    rig.plan.tell(None)
    rig.look()
    rig.plan.tell(None)
    seen = [key for _ in range(7) for key in rig.look()[0]]
    assert all(seen.count(key) >= 1 for key in rig.keys), "also the keys of the first look"
    assert rig.look()[0] == []


def test_without_news_a_round_comes_in_its_time_and_every_third_is_for_failures_too(rig):
    found = []
    for _ in range(6):
        assert 0 < rig.plan.remaining_s <= 0.05
        rig.clock.now += 0.05
        found.append(FAILED[0] in [key for _ in range(5) for key in rig.look()[0]])
    assert found.count(True) == 2


@pytest.mark.parametrize(("teller", "round_s"), [(FILES, 0.05), (ARENA, 0.25)])
def test_a_store_that_hears_of_all_puts_is_looked_through_less_often(teller, round_s):
    rig = Rig(10, teller)
    rig.end_round()
    assert rig.plan.remaining_s == pytest.approx(round_s)


def test_a_round_is_told_at_its_end_with_all_that_it_found(rig):
    rig.clock.now += 1.0
    began = rig.clock.now
    for n in range(3):
        assert rig.look([f"key {n}"])[1] is None
        rig.clock.now += 0.001
    ended = rig.look(["key 3"])[1]
    assert ended == ({f"key {n}" for n in range(4)}, began)
    rig.plan.tell(["key 9"])
    assert rig.look(["key 9"])[1] is None


def test_a_store_that_names_nothing_is_asked_for_all_each_time():
    rig = Rig(1000)
    for _ in range(3):
        rig.plan.tell(None)
        keys, ended = rig.look(["key 1"])
        assert [key for key in keys if key not in FAILED] == rig.keys
        assert ended.found == {"key 1"}
    assert rig.plan.remaining_s is None
