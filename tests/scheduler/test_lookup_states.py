"""Lookups where layers keep states: the pool has few of them, and none can be cut."""

from __future__ import annotations

import pytest

from pdstore.errors import Reason, StoreUnavailable
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import Namespace, Part, PromptKeys
from pdstore.scheduler.lookup import find, without_last
from pdstore.scheduler.usable import num_usable
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys
from pdstore.store.wrappers import WrapperStore
from tests.support.kv import settings_of

ROWS, STATE, WINDOW = 1, 0, 2
"""KV groups: the states' is the first one, as in vLLM."""
HYBRID = Namespace({"n": 1}, (Part(0, 0), Part(1, 0)), 64, needs={0: 1}, states=frozenset({0}))
WITH_WINDOW = Namespace(
    {"n": 2},
    (Part(0, 0), Part(1, 0), Part(2, 0), Part(0, 1), Part(1, 1), Part(2, 1)),
    64,
    num_shards=2,
    needs={0: 1, 2: 100},
    states=frozenset({0}),
)
ONLY_STATES = Namespace({"n": 3}, (Part(0, 0),), 64, needs={0: 1}, states=frozenset({0}))


def keys_of(namespace=HYBRID, num_tokens=300) -> PromptKeys:
    return PromptKeys(namespace).extend(range(num_tokens))


def put(store, keys: PromptKeys, ends, *, without=()):
    """Stores a prompt with states after these numbers of tokens.

    without: pairs of a block's number and a KV group: what is missing.
    """
    names = []
    for part in keys.namespace.parts:
        for number, key in enumerate(keys.store_keys([part])):
            is_kept = part.group != STATE or keys.end_of(number + 1) in ends
            if is_kept and (number, part.group) not in without:
                names.append(key)
    store.put(names, Slots(memoryview(bytearray(8)), 8, [0] * len(names), [8] * len(names)))


class Counted(WrapperStore):
    """Keeps the calls that look for keys. May not be able to search for unrelated keys."""

    def __init__(self, store, *, finds=True) -> None:
        super().__init__(store)
        self.calls: list[tuple[str, int]] = []
        self.finds = finds

    def match(self, keys):
        self.calls.append(("match", len(keys)))
        return super().match(keys)

    def which_stored(self, keys):
        self.calls.append(("which_stored", len(keys)))
        return self.wrapped.which_stored(keys)

    def optional(self, protocol):
        if protocol is FindsKeys:
            return self if self.finds else None
        return super().optional(protocol)


@pytest.fixture(params=["memory", "file", "redis"])
def store(request, tmp_path, closed_after):
    if request.param == "memory":
        return closed_after(MemoryStore())
    url = f"file://{tmp_path}/pool"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    store = closed_after(open_store(url, settings_of()))
    store.clear(HYBRID.hex)
    store.clear(WITH_WINDOW.hex)
    return store


@pytest.mark.parametrize("namespace", [HYBRID, WITH_WINDOW])
@pytest.mark.parametrize(
    ("shared", "usable", "in_common"), [(300, 256, 256), (200, 128, 192), (100, 0, 64), (30, 0, 0)]
)
def test_a_prompt_goes_on_at_the_last_state_before_it_parts_from_a_stored_one(
    store, namespace, shared, usable, in_common
):
    put(store, keys_of(namespace, 300), {128, 256})
    tokens = [*range(shared), *range(5000, 5320 - shared)]
    found = find(store, PromptKeys(namespace).extend(tokens))
    assert (found.num_tokens, found.num_shared, found.reason) == (usable, in_common, Reason.ABSENT)
    assert found.keys.num_tokens == usable


def test_the_whole_prompt_is_found_by_the_state_after_its_last_token(store):
    keys = keys_of(num_tokens=299)
    put(store, keys, {299})
    assert (find(store, keys).num_tokens, find(store, keys).reason) == (299, None)
    assert num_usable(store, keys_of(num_tokens=298)) == 0, "a state cannot be cut"


@pytest.mark.parametrize("num_tokens", [129, 500, 64 * 400 + 7])
@pytest.mark.parametrize("namespace", [HYBRID, WITH_WINDOW])
def test_a_lookup_is_three_calls_of_the_store_whatever_the_prompts_length(namespace, num_tokens):
    store = Counted(MemoryStore())
    keys = keys_of(namespace, num_tokens)
    put(store.wrapped, keys, {128}, without=[(len(keys) - 1, ROWS)])
    assert num_usable(store, keys) == 2
    assert [name for name, _ in store.calls] == ["match", "which_stored", "match"]
    store.calls.clear()
    assert num_usable(store, PromptKeys(namespace).extend(range(9000, 9000 + num_tokens))) == 0
    assert [name for name, _ in store.calls] == ["match"], "the pool has nothing of it"


@pytest.mark.parametrize("namespace", [HYBRID, WITH_WINDOW])
def test_a_prompt_that_was_handed_over_is_found_without_a_search(namespace):
    """D waits for this answer, and the keys of all states of a long prompt take long to make."""
    store, keys = Counted(MemoryStore()), keys_of(namespace, 500)
    put(store.wrapped, keys, {128, 500})
    found = find(store, keys)
    assert (found.num_tokens, found.reason) == (500, None)
    assert [name for name, _ in store.calls] == ["match", "match"]
    store.remove([keys.store_keys([Part(STATE, 0)])[-1]])
    assert num_usable(store, keys) == 2, "the state before it is searched for then"


@pytest.mark.parametrize(("ends", "usable"), [({64 * 13}, 13), ({64 * 12}, 0)])
def test_a_store_that_cannot_search_is_asked_for_the_last_eight_ends(ends, usable):
    store = Counted(MemoryStore(), finds=False)
    keys = keys_of(num_tokens=64 * 20)
    put(store.wrapped, keys, ends)
    assert num_usable(store, keys) == usable
    assert store.calls == [("match", 20)] + [("match", 1)] * 8


def test_a_state_without_the_kv_before_it_is_of_no_use(store):
    keys = keys_of()
    put(store, keys, {128, 300}, without=[(3, ROWS)])
    assert num_usable(store, keys) == 2
    assert find(store, keys).num_shared == 192
    assert find(store, keys).keys.num_tokens == 128


def test_kv_without_a_state_is_only_in_common(store):
    keys = keys_of()
    put(store, keys, set())
    found = find(store, keys)
    assert (found.num_tokens, found.num_shared, found.reason) == (0, 256, Reason.ABSENT)


@pytest.mark.parametrize("group", [STATE, WINDOW])
@pytest.mark.parametrize("shard", [0, 1])
def test_every_shard_of_a_state_and_of_its_window_must_be_there(group, shard):
    store, keys = MemoryStore(), keys_of(WITH_WINDOW)
    put(store, keys, {128, 256})
    assert num_usable(store, keys) == 4
    store.remove([keys.store_keys([Part(group, shard)])[3]])
    assert num_usable(store, keys) == 2


def test_a_window_is_needed_only_where_a_state_is(store):
    keys = keys_of(WITH_WINDOW, 640)
    put(store, keys, {256, 640}, without=[(n, WINDOW) for n in (0, 1, 4, 5, 6)])
    assert num_usable(store, keys) == 10
    put_again = [(n, WINDOW) for n in (0, 1, 4, 5, 6, 9)]
    store.clear(WITH_WINDOW.hex)
    put(store, keys, {256, 640}, without=put_again)
    assert num_usable(store, keys) == 4


def test_what_is_loaded_is_leased_and_no_other_state():
    leased = []

    class Leasing(Counted):
        def match(self, keys):
            leased.extend(keys[: super().match(keys)])
            return super().match(keys)

    store, keys = Leasing(MemoryStore()), keys_of()
    put(store.wrapped, keys, {64, 128, 192})
    assert num_usable(store, keys) == 3
    states = keys.store_keys([Part(STATE, 0)])
    assert [key for key in leased if key in states] == [states[2]]
    assert {*keys.store_keys([Part(ROWS, 0)], 0, 3)} <= {*leased}


def test_a_state_that_goes_between_the_search_and_the_match_leaves_the_one_before_it():
    class Evicting(Counted):
        def which_stored(self, keys):
            answers = super().which_stored(keys)
            self.wrapped.remove([keys[3]])
            return answers

    store, keys = Evicting(MemoryStore()), keys_of()
    put(store.wrapped, keys, {128, 256})
    assert num_usable(store, keys) == 2


def test_states_without_other_layers_have_nothing_in_common():
    store, keys = MemoryStore(), keys_of(ONLY_STATES)
    put(store, keys, {128})
    assert (find(store, keys).num_tokens, find(store, keys).num_shared) == (128, 0)


class Failing(Counted):
    """Fails at one call, after it has served so many keys of it."""

    def __init__(self, at, num_done=0) -> None:
        super().__init__(MemoryStore())
        self.at, self.num_done = at, num_done

    def _fail(self):
        if len(self.calls) == self.at:
            raise StoreUnavailable("away", num_done=self.num_done)

    def match(self, keys):
        found = super().match(keys)
        self._fail()
        return found

    def which_stored(self, keys):
        found = super().which_stored(keys)
        self._fail()
        return found


@pytest.mark.parametrize(("at", "num_done", "kept"), [(1, 3, 128), (1, 1, 0), (2, 0, 0), (3, 0, 0)])
def test_only_blocks_with_a_state_that_were_found_before_an_error_count(at, num_done, kept):
    store, keys = Failing(at, num_done), keys_of()
    put(store.wrapped, keys, {128, 256})
    found = find(store, keys)
    assert (found.num_tokens, found.reason) == (kept, Reason.STORE_DOWN)
    assert type(found.error) is StoreUnavailable


@pytest.mark.parametrize(("num_tokens", "end"), [(300, 299), (257, 256), (256, 255), (1, 0)])
def test_the_last_token_of_a_prompt_is_left_out_as_an_instance_without_it_names_it(num_tokens, end):
    keys = without_last(keys_of(num_tokens=num_tokens), num_tokens)
    shorter = keys_of(num_tokens=end)
    assert keys.num_tokens == end
    assert keys.store_keys(HYBRID.parts) == shorter.store_keys(HYBRID.parts)


def test_nothing_is_left_out_of_keys_that_end_before_the_last_token():
    assert without_last(keys_of(num_tokens=299), 300).num_tokens == 299
    assert without_last(keys_of(num_tokens=299), 301).num_tokens == 299


def test_keys_that_do_not_know_their_last_tokens_end_a_block_before():
    assert without_last(keys_of(num_tokens=300).prefix(128), 128).num_tokens == 64


def test_a_hand_off_that_d_cuts_is_still_of_the_same_prompt():
    cut = without_last(keys_of(num_tokens=300), 300)
    theirs = keys_of(num_tokens=299)
    last = theirs.hash_of(len(theirs) - 1).hex()
    assert Handoff(HandoffId.new(), num_tokens=299, last_block=last).is_of(cut)
