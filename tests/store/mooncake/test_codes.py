"""MooncakeStore turns each result code into what deploy/mooncake.md says."""

from __future__ import annotations

import pytest

from pdstore.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, put

SIZE = 256


@pytest.mark.parametrize("code", [-700, -703, -704, -707, -800])
def test_what_cannot_be_read_now_is_a_miss(store, raw, code):
    """Rule 5."""
    keys = fresh_keys(3)
    put(store, keys, [b"x" * SIZE] * 3)
    raw.script = [("get", [0, code, 0])]
    if code == -707:
        raw.script += [("get", [0]), ("get", [code, 0])]
    assert get(store, keys, [SIZE] * 3) == [b"\xee" * SIZE]


@pytest.mark.parametrize(
    ("code", "error"),
    [(-900, StoreUnavailable), (-901, StoreTimeout), (-1, StoreUnavailable), (-601, StoreError)],
)
@pytest.mark.parametrize("verb", ["exist", "get", "put", "remove"])
def test_an_outage_is_an_error_that_counts_what_was_done(store, raw, verb, code, error):
    """Rule 5: not a miss, so that the breaker hears of it."""
    keys = fresh_keys(3)
    raw.values = dict.fromkeys(keys, SIZE)
    raw.script = [(verb, [0, code, 0])]
    call = {
        "exist": lambda: store.match(keys),
        "get": lambda: get(store, keys, [SIZE] * 3),
        "put": lambda: put(store, keys, [b"x" * SIZE] * 3),
        "remove": lambda: store.remove(keys),
    }[verb]
    if verb == "put" and code == -601:
        assert call() == 3, "the keys are there, whatever the put said"
        return
    with pytest.raises(error, match=str(code)) as caught:
        call()
    assert caught.value.num_done == (0 if verb == "remove" else 1)


@pytest.mark.parametrize(
    ("code", "error"), [(-900, StoreUnavailable), (-901, StoreTimeout), (-600, StoreError)]
)
def test_a_clear_is_one_call_and_its_code_is_an_error(store, raw, code, error):
    """Rule 12."""
    namespace = "0123456789abcdef" * 2
    store.clear(namespace)
    assert raw.calls == [("clear", [f"^pds1:{namespace}:"])]
    raw.script = [("clear", [code])]
    with pytest.raises(error, match=rf"clear of pds1:{namespace}:.*\({code}\)"):
        store.clear(namespace)
    assert list(store.codes().values()) == [1]
    assert f"({code})" in next(iter(store.codes())), "a label of the metric, after its meaning"


@pytest.mark.parametrize(
    ("answer", "stored"), [(SIZE - 1, SIZE - 1), (SIZE + 1, SIZE + 1), (-600, SIZE + 1)]
)
def test_a_length_that_is_not_expected_is_wrong_length(store, raw, answer, stored):
    """Rule 5."""
    keys = fresh_keys(2)
    raw.values = {keys[0]: SIZE, keys[1]: stored}
    raw.script = [("get", [0, answer])]
    with pytest.raises(WrongLength) as caught:
        get(store, keys, [SIZE] * 2)
    assert caught.value.num_done == 1


def test_a_refused_call_is_no_wrong_length_where_the_length_is_right_or_not_told(store, raw):
    """A wrong length would be removed."""
    keys = fresh_keys(1)
    for size, words in ((-901, "in time"), (-900, "not answer"), (SIZE, "invalid arguments")):
        raw.values, raw.sizes = {keys[0]: SIZE}, {keys[0]: size}
        raw.script = [("get", [-600])]
        with pytest.raises(StoreError, match=words) as caught:
            get(store, keys, [SIZE])
        assert not isinstance(caught.value, WrongLength)
    raw.script, raw.sizes = [("get", [-600])], {keys[0]: -704}
    assert get(store, keys, [SIZE]) == [], "evicted meanwhile"


def test_a_quota_and_a_missing_tenant_are_named(store, raw):
    raw.script = [("put", [-1700])]
    [key] = fresh_keys(1)
    raw.hidden.add(key)
    with pytest.raises(StoreFull, match="quota"):
        put(store, [key], [b"x"])
    raw.script = [("put", [-1701])]
    with pytest.raises(StoreDenied, match="tenant"):
        put(store, [key], [b"x"])
