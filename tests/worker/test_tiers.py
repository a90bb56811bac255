"""KVPool over tiers: values are loaded from wherever they lie, in place where they can be."""

from __future__ import annotations

import time

import pytest

from pdstore import HandoffId, JobResult
from pdstore.errors import Reason, StoreTimeout
from pdstore.format.block import HEADER_BYTES
from pdstore.format.plan import PromptSave, SavePlan
from pdstore.store.admission import Admission
from pdstore.store.base import FRESH_S
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import TellsTiers, tier_states_of
from pdstore.store.tiers.store import TieredStore
from pdstore.testing.values import get, put
from pdstore.worker import mover
from tests.store.tiers.conftest import copies_of
from tests.support.arena_kit import SpiedArena, place_of
from tests.support.clock import Clock
from tests.support.kv import BLOCK_BYTES, POISON
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save

SIZE = BLOCK_BYTES + HEADER_BYTES
BLOCKS = 5  # of 64 tokens
NUM_TOKENS = 64 * BLOCKS


@pytest.fixture
def arena(library, tmp_path, closed_after):
    return closed_after(SpiedArena(library, tmp_path))


@pytest.fixture
def files(tmp_path, closed_after):
    return closed_after(FileStore(tmp_path / "files"))


@pytest.fixture
def store(arena, files, closed_after):
    return closed_after(TieredStore([arena, files]))


def keys_of(p, num_tokens=NUM_TOKENS):
    return p.cache.keys(range(num_tokens)).store_keys(p.layout.parts)


def saved(p, store):
    """Saves a prompt of P, waits until it is in all tiers, and returns its keys."""
    assert save(p, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert store.flush()
    return keys_of(p)


def damage(store, key):
    """Changes a bit of a stored value."""
    (value,) = get(store, [key], [SIZE])
    store.remove([key])
    put(store, [key], [value[:-1] + bytes([value[-1] ^ 1])])


@pytest.fixture
def p(instance):
    return instance(range_bytes=2 * BLOCK_BYTES)


@pytest.fixture(
    params=[2 * BLOCK_BYTES, BLOCK_BYTES * 35 // 100, BLOCK_BYTES // 8],
    ids=["one window", "one range of two windows", "many ranges"],
)
def d(request, instance):
    return instance(fill=POISON, range_bytes=request.param)


def test_what_is_saved_in_place_is_copied_down_and_loaded_in_place(p, d, store, arena, files):
    keys = saved(p, store)
    assert files.match(keys) == BLOCKS
    arena.calls.clear()
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert set(arena.calls) == {"start_scatter", "confirm"}


@pytest.mark.parametrize("changes", [{"layer_ranges": 3}, {"draft": "a draft"}, {"native": "off"}])
def test_each_part_of_a_block_goes_down(instance, store, files, changes):
    p = instance(range_bytes=BLOCK_BYTES, **changes)
    keys = saved(p, store)
    assert files.which_stored(keys) == [True] * len(keys)
    _, below = tier_states_of(store)
    assert (below.copies["copied"] >= len(keys), below.copies["lost"]) == (True, 0)


def test_the_bytes_below_are_those_of_the_arena(p, store, arena, files):
    keys = saved(p, store)
    assert get(files, keys, [SIZE] * BLOCKS) == get(arena, keys, [SIZE] * BLOCKS)


def test_a_save_that_falls_short_is_copied_down_as_far_as_it_came(
    instance, tmp_path, files, closed_after
):
    room = 3 * (SIZE // 4096 + 1) * 4096 + 16384
    first = closed_after(FileStore(tmp_path / "small", budget=room))
    store = closed_after(TieredStore([first, files]))
    p = instance(over=store, range_bytes=8 * BLOCK_BYTES)
    result = save(p, range(NUM_TOKENS))
    assert (result.num_tokens, result.reason) == (192, Reason.STORE_FULL)
    assert store.flush()
    assert files.match(keys_of(p)) == first.match(keys_of(p)) == 3


@pytest.mark.parametrize(
    "gone",
    [[0, 1, 2, 3, 4], [0], [4], [0, 1, 2], [2, 3, 4], [1, 3], [0, 2, 4]],
    ids=lambda gone: "".join(map(str, gone)),
)
def test_a_load_of_values_that_lie_below_is_whole(p, d, store, arena, gone):
    keys = saved(p, store)
    arena.remove([keys[i] for i in gone])
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert arena.which_stored(keys) == [True] * BLOCKS, "what lay below is promoted"
    assert store.optional(TellsTiers).promoted_from(keys) == [int(i in gone) for i in range(BLOCKS)]
    arena.calls.clear()
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert "get" not in arena.calls, "now it is copied in place"


def test_a_block_that_no_tier_has_ends_a_load_before_it(p, d, store, arena, files):
    keys = saved(p, store)
    found = d.cache.match(d.cache.keys(range(NUM_TOKENS)))
    arena.remove([keys[0], keys[3]])
    files.remove(keys[3:])
    result = d.pool.load(found.keys, D_BLOCKS).wait(10)
    assert result == JobResult(192, Reason.LOST)
    assert_loaded(p, d, 192)


def test_a_damaged_value_below_is_removed_and_ends_a_load_before_it(p, d, store, arena, files):
    keys = saved(p, store)
    arena.remove(keys)
    damage(files, keys[2])
    assert load(d, range(NUM_TOKENS)) == JobResult(128, Reason.CORRUPT)
    assert_loaded(p, d, 128)
    assert files.which_stored(keys) == [True, True, False, True, True]


@pytest.mark.parametrize("damaged", [[0], [2], [4], [1, 3], [0, 1, 2, 3, 4]], ids=str)
def test_a_damaged_value_above_is_loaded_from_below_and_promoted(
    p, d, store, arena, files, damaged
):
    keys = saved(p, store)
    for i in damaged:
        place_of(arena, keys[i], SIZE)[-1] ^= 1
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert get(arena, keys, [SIZE] * BLOCKS) == get(files, keys, [SIZE] * BLOCKS)
    assert copies_of(store, 0)["wrong"] == copies_of(store)["promoted"] == len(damaged)


def test_a_damaged_value_above_is_removed_there_alone(p, d, store, arena, files, monkeypatch):
    keys = saved(p, store)
    monkeypatch.setattr(Admission, "admits", lambda self, age_s: False)
    monkeypatch.setattr(arena, "oldest_age_s", lambda sizes: 1.0)
    place_of(arena, keys[2], SIZE)[-1] ^= 1
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert arena.which_stored(keys) == [True, True, False, True, True]
    assert files.match(keys) == BLOCKS


def test_a_value_that_is_damaged_in_every_tier_is_removed_from_all(p, d, store, arena, files):
    keys = saved(p, store)
    place_of(arena, keys[2], SIZE)[-1] ^= 1
    damage(files, keys[2])
    assert load(d, range(NUM_TOKENS)) == JobResult(128, Reason.CORRUPT)
    assert d.tokens(D_BLOCKS)[:128].equal(p.tokens(P_BLOCKS)[:128])
    assert not arena.which_stored(keys)[2]
    assert not files.which_stored(keys)[2]
    save(p, range(NUM_TOKENS))
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)


def test_a_value_of_wrong_length_above_is_loaded_from_below(p, d, store, arena, files):
    keys = saved(p, store)
    arena.remove(keys[1:3])
    put(arena, keys[1:3], [b"a" * 100, b"b" * (SIZE + 10)])
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert get(arena, keys, [SIZE] * BLOCKS) == get(files, keys, [SIZE] * BLOCKS)


@pytest.mark.parametrize("evicted", [[0], [3], [1, 2], [0, 1, 2, 3, 4]], ids=str)
def test_what_is_evicted_while_it_is_copied_is_loaded_from_below(p, d, store, arena, evicted):
    keys = saved(p, store)
    arena.before["confirm"] = lambda: arena.remove([keys[i] for i in evicted])
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)


def test_what_is_evicted_while_it_is_copied_and_wrong_below_is_not_called_lost(
    p, d, store, arena, files
):
    keys = saved(p, store)
    arena.before["confirm"] = lambda: arena.remove(keys[3:4])
    damage(files, keys[3])
    assert load(d, range(NUM_TOKENS)) == JobResult(192, Reason.CORRUPT)


@pytest.fixture
def staged_stack(files, tmp_path, closed_after):
    """Files over files: values pass through staging, and the library reads those above."""
    above = closed_after(FileStore(tmp_path / "above"))
    return closed_after(TieredStore([above, files])), above


def test_through_staging_too_a_damaged_value_is_loaded_from_below(instance, staged_stack, files):
    stack, above = staged_stack
    p, d = (instance(over=stack, fill=fill, range_bytes=2 * BLOCK_BYTES) for fill in (None, POISON))
    keys = saved(p, stack)
    for key in (keys[1], keys[2], keys[4]):
        damage(above, key)
    above.remove(keys[3:4])
    put(above, keys[3:4], [b"short"])
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert get(above, keys, [SIZE] * BLOCKS) == get(files, keys, [SIZE] * BLOCKS)
    assert (copies_of(stack, 0)["wrong"], copies_of(stack)["promoted"]) == (4, 4)


def test_an_arena_full_of_leases_stays_as_it_is_and_the_load_is_whole(
    instance, library, tmp_path, files, closed_after
):
    options = {"size": 1 << 20, "slab_bytes": 64 << 10, "lease_s": 600}
    (tmp_path / "small").mkdir()
    arena = closed_after(SpiedArena(library, tmp_path / "small", **options))
    stack = closed_after(TieredStore([arena, files]))
    p, d = (instance(over=stack, fill=fill, range_bytes=2 * BLOCK_BYTES) for fill in (None, POISON))
    keys = saved(p, stack)
    arena.remove(keys)
    others = []
    for first in range(5000, 9000, 64):
        save(p, range(first, first + 64))
        others += p.cache.keys(range(first, first + 64)).store_keys(p.layout.parts)
        others = [key for key in others if arena.match([key])]
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert 0 < len(others) == arena.match(others)
    assert not any(arena.which_stored(keys))


def test_an_instance_that_never_saves_promotes_nothing(p, instance, store, arena):
    keys = saved(p, store)
    arena.remove(keys[1:])
    d = instance(fill=POISON, publish=False)
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert arena.match(keys) == 1


def test_an_error_of_a_promotion_is_none_of_the_load(p, d, store, arena, monkeypatch):
    keys = saved(p, store)
    arena.remove(keys)

    def fail(keys, slots):
        raise StoreTimeout("too late")

    monkeypatch.setattr(arena, "put", fail)
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)


@pytest.mark.parametrize("role", ["prefill", "both"])
@pytest.mark.parametrize("is_handed_off", [True, False])
def test_what_others_wait_for_enters_the_first_tier_and_may_be_refused_below(
    instance, arena, tmp_path, closed_after, monkeypatch, role, is_handed_off
):
    asked = []
    monkeypatch.setattr(Admission, "admits", lambda self, age_s: asked.append(age_s))
    below = closed_after(MemoryStore(budget=3 * SIZE, lease_s=0.001))
    stack = closed_after(TieredStore([arena, below]))
    p = instance(over=stack, role=role)
    assert save(p, range(192), handoff=HandoffId("1" * 32)) == JobResult(192)
    assert stack.flush()
    assert below.match(keys_of(p, 192)) == 3
    time.sleep(FRESH_S + 0.1)
    keys = p.cache.keys(range(1000, 1192))
    result = p.pool.save(
        keys, P_BLOCKS, handoff=HandoffId("2" * 32) if is_handed_off else None
    ).wait(10)
    assert stack.flush()
    store_keys = keys.store_keys(p.layout.parts)
    is_awaited = is_handed_off or role == "prefill"
    assert result == (JobResult(192) if is_awaited else JobResult(0, Reason.NOT_ADMITTED))
    assert arena.match(store_keys) == (3 if is_awaited else 0)
    assert below.match(store_keys) == 0
    assert asked
    assert copies_of(stack).get("not_admitted", 0) == (3 if is_awaited else 0)


def test_a_p_that_only_hands_off_learns_which_blocks_it_found_and_which_are_new(
    instance, store, monkeypatch
):
    told = {"found": [], "saved": []}
    for name, of_call in told.items():
        monkeypatch.setattr(
            Admission, name, lambda self, names, waited_s=0.0, to=of_call: to.append([*names])
        )
    p = instance(over=store, role="prefill")
    keys = p.cache.keys(range(256))
    first_save = PromptSave(64, time.monotonic())
    part = SavePlan(keys.prefix(128), 64, is_awaited=True, first_save=first_save)
    whole = SavePlan(keys, 128, handoff=HandoffId("1" * 32), first_save=first_save)
    for plan in (part, whole):
        begun = p.pool.begin_save(plan, P_BLOCKS)
        begun.layers_done(len(p.caches))
        begun.job.wait(10)
    assert told == {
        "found": [[*keys.hashes(0, 1)], []],
        "saved": [[*keys.hashes(1, 2)], [*keys.hashes(2, 4)]],
    }


@pytest.mark.parametrize(
    ("role", "num_idle"),
    [("both", 0), ("prefill", 0), pytest.param("prefill", 1, id="beside an idle pool")],
)
def test_users_in_turn_find_in_small_tiers_what_they_hold(
    instance, closed_after, monkeypatch, role, num_idle
):
    """LRU would find nothing: each block leaves both tiers shortly before its next use."""
    clock = Clock()
    monkeypatch.setattr(mover, "Admission", lambda: Admission(clock))
    first, below = (MemoryStore(budget=n * SIZE, lease_s=0.5, clock=clock) for n in (9, 27))
    stack = closed_after(TieredStore([first, below]))
    p, *_ = [instance(over=stack, role=role) for _ in range(1 + num_idle)]
    found = []
    for number in range(16 * 12):
        clock.now += 5.0
        first_token = 1000 * (number % 12)
        keys = p.cache.keys(range(first_token, first_token + 192))
        match = p.cache.match(keys)
        found.append(match.num_tokens // 64)
        if match.num_tokens:
            assert p.pool.load(match.keys, P_BLOCKS).wait(10).reason is None
        first_save = PromptSave(match.num_tokens, time.monotonic())
        handoff = HandoffId(f"{number:032x}") if role == "prefill" else None
        plan = SavePlan(keys, match.num_tokens, handoff=handoff, first_save=first_save)
        begun = p.pool.begin_save(plan, P_BLOCKS)
        begun.layers_done(len(p.caches))
        begun.job.wait(10)
        assert stack.flush()
        if number == 23:
            assert not any(found[12:])
    assert sum(found[-48:]) > 0.5 * 48 * 3


PREFIX = range(192)
PROMPT = [*PREFIX, *range(1000, 1100)]


@pytest.fixture
def prefix(p, store):
    """The keys of a prefix that is stored in all tiers."""
    assert save(p, PREFIX) == JobResult(192)
    assert store.flush()
    return keys_of(p, 192)


def test_with_a_seal_key_all_goes_through_staging_and_down_sealed(
    instance, store, arena, files, tmp_path
):
    key_file = tmp_path / "seal.key"
    key_file.write_text("a" * 64)
    key_file.chmod(0o600)
    stack = TieredStore([arena, files], num_right=len)
    p, d = (
        instance(over=stack, fill=fill, seal_key_file=key_file, range_bytes=2 * BLOCK_BYTES)
        for fill in (None, POISON)
    )
    assert save(p, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert stack.flush()
    keys = keys_of(p)
    assert files.match(keys) == BLOCKS
    arena.remove(keys)
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert not {"fill", "start_scatter"} & set(arena.calls)
