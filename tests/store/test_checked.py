"""Counts: only an int in 0..len(keys) is believed."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreError, WrongLength
from pdstore.format.keys import BlockKey
from pdstore.store.base import count_of, num_done_of, stored_among
from pdstore.store.memory import MemoryStore

KEYS = [BlockKey("a"), BlockKey("b")]
NO_COUNTS = [-1, 3, 1 << 70, True, 1.0, None, "1", [1]]


@pytest.mark.parametrize("answer", [0, 1, 2])
def test_a_count_of_leading_keys_is_the_answer(answer):
    assert count_of(answer, KEYS, MemoryStore()) == answer


@pytest.mark.parametrize("answer", NO_COUNTS)
def test_any_other_answer_is_an_error_that_names_the_store_and_the_first_key(answer):
    with pytest.raises(StoreError, match=r"memory://.* 2 keys from a on"):
        count_of(answer, KEYS, MemoryStore())


def test_no_keys_have_the_count_0_only():
    assert count_of(0, [], MemoryStore()) == 0
    with pytest.raises(StoreError):
        count_of(1, [], MemoryStore())


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_an_error_keeps_the_keys_that_were_served_before_it(num_done):
    assert num_done_of(StoreError("", num_done=num_done), KEYS) == num_done


@pytest.mark.parametrize("num_done", NO_COUNTS)
def test_an_error_that_miscounts_served_nothing(num_done):
    assert num_done_of(StoreError("", num_done=num_done), KEYS) == 0


def test_a_wrong_length_leaves_the_key_that_it_is_about():
    assert num_done_of(WrongLength("", num_done=1), KEYS) == 1
    assert num_done_of(WrongLength("", num_done=2), KEYS) == 0


def test_the_keys_with_a_yes_are_stored():
    assert stored_among([False, True], KEYS, MemoryStore()) == {"b"}
    assert stored_among((), [], MemoryStore()) == set()


@pytest.mark.parametrize("answers", [None, 2, [True], [True] * 3, [1, 0], [True, None], "ab"])
def test_answers_that_are_not_a_bool_a_key_are_an_error(answers):
    with pytest.raises(StoreError, match="memory://"):
        stored_among(answers, KEYS, MemoryStore())
