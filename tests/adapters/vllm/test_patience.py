"""Patience: first answers are waited for, all of a step's together no longer than its time."""

from __future__ import annotations

import threading
import time

from pdstore.adapters.vllm.patience import Patience
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.scheduler.lookup import Lookup, Match

KEYS = PromptKeys(Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)).extend(range(10))


def lookup_of() -> Lookup:
    return Lookup(KEYS, None, 60.0, lambda match: None)


def test_an_answer_that_comes_soon_is_waited_for():
    lookup, found = lookup_of(), Match(KEYS, 10, None)
    threading.Timer(0.05, lookup.finish, [found]).start()
    assert Patience(step_s=30.0).first_answer(lookup) is found


def test_the_lookups_of_a_step_share_its_time():
    patience, began = Patience(step_s=0.05), time.monotonic()
    assert [patience.first_answer(lookup_of()) for _ in range(1000)] == [None] * 1000
    assert 0.05 <= time.monotonic() - began < 10.0, "not 1,000 times as long"


def test_another_step_has_time_again():
    patience = Patience(step_s=0.05)
    assert patience.first_answer(lookup_of()) is None
    patience.renew()
    began = time.monotonic()
    patience.first_answer(lookup_of())
    assert time.monotonic() - began >= 0.04
