"""Both halves together: what P saves is what D has, or less, and never something else."""

from __future__ import annotations

import threading

import pytest
import torch

from pdstore import Job, JobResult, KVPool, LayerSpec, Layout, PrefixCacheManager
from pdstore.errors import (
    ConfigError,
    LayoutError,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from pdstore.format.block import HEADER_BYTES
from pdstore.format.handoff import HandoffId
from pdstore.outcome import Direction, Reason
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.faulty import Faulty
from tests.support.kv import (
    BLOCK_BYTES,
    LAYERS,
    POISON,
    Instance,
    caches_of,
    eventually,
    settings_of,
)


@pytest.fixture
def store():
    store = open_store("memory://", settings_of())
    yield store
    store.close()


@pytest.fixture
def instance(store):
    made = []

    def instance(fill=None, over=None, **changes) -> Instance:
        made.append(Instance(over or store, fill, **changes))
        return made[-1]

    yield instance
    for one in made:
        one.close()


@pytest.fixture
def p(instance):
    return instance()


@pytest.fixture
def d(instance):
    return instance(fill=POISON)


P_BLOCKS, D_BLOCKS = list(range(20, 40)), list(range(3, 23))[::-1]


def save(p, tokens, **more):
    keys = p.cache.keys(tokens)
    return p.pool.save(keys, P_BLOCKS, **more).wait(10)


def load(d, tokens, **more):
    found = d.cache.match(d.cache.keys(tokens))
    return d.pool.load(found.keys, D_BLOCKS, **more).wait(10)


def assert_loaded(p, d, num_tokens, first_token=0):
    """D has P's KV in [first_token, num_tokens) and its poison everywhere else."""
    for layer in range(len(p.caches)):
        got, want = d.tokens(D_BLOCKS, layer), p.tokens(P_BLOCKS, layer)
        assert torch.equal(got[first_token:num_tokens], want[first_token:num_tokens])
        assert (got[:first_token] == POISON).all()
        assert (got[num_tokens:] == POISON).all()
        others = [i for i in range(len(d.caches[layer])) if i not in D_BLOCKS]
        assert (d.caches[layer][others] == POISON).all()


@pytest.mark.parametrize("num_tokens", [1, 5, 15, 16, 17, 63, 64, 65, 128, 200, 320])
def test_d_has_what_p_saved_whatever_the_length(p, d, num_tokens):
    assert save(p, range(num_tokens)).num_tokens == num_tokens
    assert load(d, range(num_tokens)).num_tokens == num_tokens
    assert_loaded(p, d, num_tokens)


@pytest.mark.parametrize("first_token", [16, 48, 64, 80, 192])
def test_a_load_leaves_the_blocks_before_its_first_token_alone(p, d, first_token):
    save(p, range(200))
    assert load(d, range(200), first_token=first_token).num_tokens == 200
    assert_loaded(p, d, 200, first_token)


def test_p_and_d_may_have_other_engine_blocks(instance, p):
    d = instance(fill=POISON, engine_block_tokens=32)
    save(p, range(200))
    found = d.cache.match(d.cache.keys(range(200)))
    assert d.pool.load(found.keys, list(range(7))).wait(10).num_tokens == 200
    assert torch.equal(d.tokens(range(7))[:200], p.tokens(P_BLOCKS)[:200])


def test_p_and_d_may_have_another_tp_size(instance, store):
    p = instance(kv_shards=2)
    save(p, range(100))
    for rank in range(2):
        settings = settings_of(kv_shards=2)
        layout = Layout.of(
            settings,
            dtype="float32",
            layers=LAYERS,
            engine_block_tokens=16,
            rope="",
            tp_rank=rank,
            tp_size=2,
        )
        namespace = layout.namespace(settings, weights="w")
        caches = caches_of(layout, fill=POISON)
        pool = KVPool(settings, layout, caches, namespace, store=store)
        assert pool.load(p.cache.keys(range(100)), D_BLOCKS).wait(10).num_tokens == 100
        got = caches[0][D_BLOCKS].flatten(0, 1)[:100]
        assert torch.equal(got, p.tokens(P_BLOCKS)[:100, rank : rank + 1])
        pool.close()


def test_two_groups_are_two_values_of_each_block(instance, store):
    layers = (LayerSpec(2, 8), LayerSpec(1, 16, kind="sliding", window=64))
    p, d = instance(layers=layers), instance(fill=POISON, layers=layers)
    save(p, range(100))
    assert load(d, range(100)).num_tokens == 100
    for layer in range(2):
        assert torch.equal(d.tokens(D_BLOCKS, layer)[:100], p.tokens(P_BLOCKS, layer)[:100])


def test_a_longer_prompt_finds_the_full_blocks_of_a_shorter_one(p, d):
    save(p, range(100))
    found = d.cache.match(d.cache.keys(range(150)))
    assert (found.num_tokens, found.reason) == (64, Reason.ABSENT)
    assert found.keys.num_tokens == 64


def test_chunks_saved_one_after_the_other_are_the_whole(p, d):
    keys, jobs, saved = p.cache.keys(range(200)), [], 0
    for end in (50, 100, 150):
        jobs.append(p.pool.save(keys.prefix(end), P_BLOCKS, first_token=saved))
        saved = keys.prefix(end).num_tokens
    attempt, params = p.cache.announce(keys)
    last = p.pool.save(keys, P_BLOCKS, first_token=saved, handoff=attempt, after=jobs)
    lookup = d.cache.lookup(d.cache.keys(range(200)), params)
    found = eventually(lookup.poll)
    assert (found.num_tokens, found.reason) == (200, None)
    assert last.wait(10).num_tokens == 200
    assert d.pool.load(found.keys, D_BLOCKS).wait(10).num_tokens == 200
    assert_loaded(p, d, 200)


def test_a_save_keeps_what_the_cache_was_when_it_was_captured(p, d):
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    eventually(lambda: job.captured)
    want = [c.clone() for c in p.caches]
    for cache in p.caches:
        cache.fill_(0)
    job.wait(10)
    load(d, range(200))
    for got, before in zip(d.caches, want, strict=True):
        kept, had = got[D_BLOCKS].flatten(0, 1), before[P_BLOCKS].flatten(0, 1)
        assert torch.equal(kept[:200], had[:200])


def test_a_save_waits_for_its_ready_event(p, d):
    class Event:
        ready = threading.Event()

        def synchronize(self):
            self.ready.wait(30)

    event = Event()
    source = [c.clone() for c in p.caches]
    for cache in p.caches:
        cache.fill_(0)
    job = p.pool.save(p.cache.keys(range(100)), P_BLOCKS, ready=event)
    assert not job.captured
    for cache, values in zip(p.caches, source, strict=True):
        cache.copy_(values)
    event.ready.set()
    job.wait(10)
    load(d, range(100))
    assert_loaded(p, d, 100)


def test_the_callers_lists_may_change_after_the_call(p, d):
    keys, ids = p.cache.keys(range(100)), list(P_BLOCKS)
    job = p.pool.save(keys, ids)
    ids[:] = [0] * len(ids)
    keys.extend(range(100))
    assert job.wait(10).num_tokens == 100
    assert load(d, range(100)).num_tokens == 100
    assert_loaded(p, d, 100)


def raw(store) -> dict:
    """The values behind a memory store."""
    return {k: v.data for k, v in store._shelf.values.items()}


def plant(store, key, data: bytes) -> None:
    store.remove([key])
    store.put([key], Slots(memoryview(bytearray(data)), len(data), [0], [len(data)]))


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: flip(data, HEADER_BYTES), Reason.CORRUPT),
        (lambda data: flip(data, 5), Reason.CORRUPT),
        (lambda data: flip(data, len(data) - 1), Reason.CORRUPT),
        (lambda data: data[:-1], Reason.CORRUPT),
        (lambda data: data + b"\0", Reason.CORRUPT),
        (lambda data: data[:10], Reason.CORRUPT),
    ],
    ids=["first", "header", "last", "short", "long", "stub"],
)
def test_a_damaged_value_is_a_miss_is_removed_and_heals(p, d, store, block, damage, reason):
    save(p, range(200))
    key = p.cache.keys(range(200)).store_keys(p.layout.parts)[block]
    plant(store, key, damage(raw(store)[key]))
    result = load(d, range(200))
    assert (result.num_tokens, result.reason) == (64 * block, reason)
    assert_loaded(p, d, 64 * block)
    assert store.match([key]) == 0
    save(p, range(200))
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)


def test_swapped_values_are_misses(instance, store):
    layers = (LayerSpec(2, 8), LayerSpec(2, 8, kind="sliding", window=64))
    p, d = (instance(fill=f, kv_shards=2, layers=layers) for f in (None, POISON))
    save(p, range(128))
    keys = p.cache.keys(range(128)).store_keys(p.layout.parts)
    values = raw(store)
    for a, b in ((0, 4), (0, 1), (0, 2)):  # two blocks, two shards, two groups
        plant(store, keys[a], values[keys[b]])
        assert load(d, range(128)).reason is Reason.FOREIGN
        assert (d.tokens(D_BLOCKS) == POISON).all()
        plant(store, keys[a], values[keys[a]])


def test_a_block_is_loaded_whole_or_not_at_all(instance, store):
    p, d = (instance(fill=f, kv_shards=2) for f in (None, POISON))
    save(p, range(200))
    keys = p.cache.keys(range(200)).store_keys(p.layout.parts)
    store.remove([keys[5]])  # the second shard of block 2
    assert d.cache.match(d.cache.keys(range(200))).num_tokens == 128
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.LOST)
    assert_loaded(p, d, 128)


def test_another_namespace_never_hits(instance, p):
    save(p, range(100))
    for changes in ({"weights": "v"}, {"salt": "s"}, {"hash": "xxh3_128"}, {"order": "head"}):
        other = instance(fill=POISON, **changes)
        found = other.cache.match(other.cache.keys(range(100)))
        assert (found.num_tokens, found.reason) == (0, Reason.ABSENT)


def test_a_request_with_its_own_salt_or_adapter_never_hits_another(p, d):
    save(p, range(100))
    for own in ({"cache_salt": b"a"}, {"lora": b"b"}):
        assert d.cache.match(d.cache.keys(range(100), **own)).num_tokens == 0


def test_what_is_stored_is_not_moved_again(p):
    save(p, range(200))
    before = p.pool.metrics.registry.get_sample_value("pdstore_tokens_total", {"verb": "saved"})
    assert save(p, range(200)).num_tokens == 200
    after = p.pool.metrics.registry.get_sample_value("pdstore_tokens_total", {"verb": "saved"})
    assert before == after == 200


def test_a_block_lost_before_the_check_is_saved_again(store, instance):
    class Forgetful(WrapperStore):
        """Loses one earlier block the moment the last one is put."""

        lose = None

        def put(self, keys, slots):
            n = super().put(keys, slots)
            if self.lose and any(":partial:" in k for k in keys):
                super().remove([self.lose])
                self.lose = None
            return n

    forgetful = Forgetful(store)
    p, d = instance(over=forgetful), instance(fill=POISON)
    keys = p.cache.keys(range(200))
    forgetful.lose = keys.store_keys(p.layout.parts)[1]
    attempt, params = p.cache.announce(keys)
    assert p.pool.save(keys, P_BLOCKS, handoff=attempt).wait(10).reason is None
    found = eventually(d.cache.lookup(d.cache.keys(range(200)), params).poll)
    assert found.num_tokens == 200
    d.pool.load(found.keys, D_BLOCKS).wait(10)
    assert_loaded(p, d, 200)


def test_a_handoffs_blocks_are_not_captured_before_it_is_over(store, instance):
    """Blocks that were lost are copied again from the same place, which must not be reused."""

    class Watched(WrapperStore):
        captured: tuple = ()

        def match(self, keys):
            if len(keys) > 1:
                self.captured += (job.captured,)
                if len(self.captured) == 1:
                    super().remove(keys[1:2])
            return super().match(keys)

    watched = Watched(store)
    p, d = instance(over=watched), instance(fill=POISON)
    keys = p.cache.keys(range(200))
    attempt, _ = p.cache.announce(keys)
    job = p.pool.save(keys.prefix(0), P_BLOCKS)
    job = p.pool.save(keys, P_BLOCKS, handoff=attempt, after=[job])
    assert job.wait(10).reason is None
    assert watched.captured == (False, False)
    load(d, range(200))
    assert_loaded(p, d, 200)


def test_what_a_save_says_is_durable_is_there(store, instance):
    class Liar(WrapperStore):
        def put(self, keys, slots):
            return len(keys)

    p = instance(over=Liar(store))
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    assert job.wait(10) == JobResult(0, Reason.LOST)
    assert not job.durable


def test_done_is_said_only_of_a_whole_chain(store, instance):
    class Sieve(WrapperStore):
        """Accepts everything and keeps only the first block and markers."""

        first = None

        def put(self, keys, slots):
            n = super().put(keys, slots)
            blocks = [k for k in keys if ":0:0:" in k]
            self.first = self.first or (blocks[0] if blocks else None)
            super().remove([k for k in blocks if k != self.first])
            return n

    p = instance(over=Sieve(store))
    keys = p.cache.keys(range(200))
    attempt, _ = p.cache.announce(keys)
    result = p.pool.save(keys, P_BLOCKS, handoff=attempt).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.LOST)
    assert store.match([attempt.done(p.namespace, 0)]) == 0
    eventually(lambda: store.match([attempt.failed(p.namespace)]) == 1)


def test_a_full_store_says_failed_to_d(store, instance):
    class Full(WrapperStore):
        def put(self, keys, slots):
            if any(":handoff:" not in k for k in keys):
                raise StoreFull("no room", num_done=0)
            return super().put(keys, slots)

    p, d = instance(over=Full(store)), instance(fill=POISON, handoff_wait_s=30.0)
    keys = p.cache.keys(range(100))
    attempt, params = p.cache.announce(keys)
    job = p.pool.save(keys, P_BLOCKS, handoff=attempt)
    assert job.wait(10).reason is Reason.STORE_FULL
    found = eventually(d.cache.lookup(d.cache.keys(range(100)), params).poll, 5)
    assert (found.num_tokens, found.reason) == (0, Reason.HANDOFF_FAILED)


class NotReady:
    def synchronize(self):
        raise RuntimeError("the event is of another device")


@pytest.mark.parametrize("why", ["fault", "queue_full", "deadline", "cancelled", "no_marker"])
def test_a_handoff_that_fails_in_any_way_is_not_waited_for(store, instance, why):
    class Store(WrapperStore):
        hold = threading.Event()

        def put(self, keys, slots):
            if why == "deadline" and ":handoff:" not in keys[0]:
                self.hold.wait(0.3)
            if why == "no_marker" and ":done" in keys[0]:
                return 0
            return super().put(keys, slots)

    limits = {"deadline": {"save_deadline_s": 0.1}, "queue_full": {"queue_jobs": 1}}
    p = instance(over=Store(store), **limits.get(why, {}))
    d = instance(fill=POISON, handoff_wait_s=30.0)
    keys = p.cache.keys(range(100))
    attempt, params = p.cache.announce(keys)
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    gate = Job(Direction.SAVE, lambda reason, error: None)
    if why == "queue_full":
        p.pool.save(p.cache.keys(range(50)), P_BLOCKS, after=[gate])
    ready = NotReady() if why == "fault" else None
    job = p.pool.save(keys, P_BLOCKS, handoff=attempt, ready=ready)
    if why == "cancelled":
        job.cancel()
    assert job.wait(10).reason is not None
    found = lookup.wait(5)
    assert found.reason in (Reason.HANDOFF_FAILED, None)
    gate.settle(JobResult(0))


def test_two_ranks_mark_their_own_shards_only(instance, store):
    """An MLA group is every rank's; the hand-off is over when the slower rank has said so."""
    mla = LayerSpec(1, 24, value_dim=0, kind="mla")
    settings = settings_of(kv_shards=2)
    ranks = [
        Layout.of(
            settings,
            dtype="float32",
            layers=(mla, LayerSpec(2, 8)),
            engine_block_tokens=16,
            rope="",
            tp_rank=rank,
            tp_size=2,
        )
        for rank in range(2)
    ]
    namespace = ranks[0].namespace(settings, weights="w")
    pools = [KVPool(settings, r, caches_of(r), namespace, store=store) for r in ranks]
    d = PrefixCacheManager(settings, namespace, store=store)
    keys = d.keys(range(100))
    attempt, params = d.announce(keys)
    lookup = d.lookup(keys, params)
    assert pools[1].save(keys, P_BLOCKS, handoff=attempt).wait(10).reason is None
    assert store.match([attempt.done(namespace, 1)]) == 1
    assert store.match([attempt.done(namespace, 0)]) == 0
    assert lookup.poll() is None
    pools[0].save(keys, P_BLOCKS, handoff=attempt)
    assert lookup.wait(5).num_tokens == 100
    d.close()
    for pool in pools:
        pool.close()


def test_a_withdrawn_handoff_is_not_waited_for(instance):
    p, d = instance(), instance(fill=POISON, handoff_wait_s=30.0)
    attempt, params = p.cache.announce(p.cache.keys(range(100)))
    lookup = d.cache.lookup(d.cache.keys(range(100)), params)
    assert p.pool.abort_handoff(attempt).wait(10).reason is None
    assert lookup.wait(5).reason is Reason.HANDOFF_FAILED


def test_a_read_only_instance_saves_nothing(store, instance):
    p = instance(publish=False)
    result = save(p, range(100))
    assert (result.num_tokens, result.reason) == (0, Reason.READ_ONLY)
    assert not any(":0:0:" in k for k in raw(store))


def test_a_hanging_store_ends_jobs_in_time_and_keeps_slots_until_it_returns(store, instance):
    faulty = Faulty(store)
    p = instance()
    save(p, range(200))
    d = instance(fill=POISON, over=faulty, load_deadline_s=0.05)
    keys = d.cache.keys(range(200))
    faulty.hold()
    job = d.pool.load(keys, D_BLOCKS)
    assert job.wait(5).reason is Reason.DEADLINE
    lent = d.pool.metrics.registry.get_sample_value
    assert lent("pdstore_slots_lent") > 0
    for cache in d.caches:  # the engine gives the blocks to somebody else
        cache.fill_(1.0)
    faulty.release()
    eventually(lambda: lent("pdstore_slots_lent") == 0)
    assert all((cache == 1.0).all() for cache in d.caches)
    assert d.pool.load(keys, D_BLOCKS).wait(5).num_tokens == 200


def test_errors_of_the_store_end_the_job_with_what_is_there(store, instance):
    class Breaks(WrapperStore):
        gets = 0

        def get(self, keys, slots):
            self.gets += ":0:0:" in keys[0]
            if self.gets > 1:
                raise StoreUnavailable("gone")
            return super().get(keys, slots)

    p = instance()
    save(p, range(64 * 5))
    d = instance(fill=POISON, over=Breaks(store), range_bytes=2 * BLOCK_BYTES, workers=2)
    result = load(d, range(64 * 5))
    assert (result.num_tokens, result.reason) == (128, Reason.STORE_DOWN)
    assert_loaded(p, d, 128)


@pytest.mark.parametrize("seed", range(12))
def test_under_random_faults_d_has_a_right_prefix_and_nothing_leaks(store, instance, seed):
    faulty = Faulty(store, seed=seed, error_rate=0.05, miss_rate=0.05, corrupt_rate=0.05)
    p, d = instance(over=faulty), instance(fill=POISON, over=faulty)
    num_loaded = 0
    for length in (5, 64, 100, 200, 320, 317):
        tokens = [seed, length, *range(length - 2)]
        save(p, tokens)
        for cache in d.caches:
            cache.fill_(POISON)
        found = d.cache.match(d.cache.keys(tokens))
        result = d.pool.load(found.keys, D_BLOCKS).wait(10)
        assert result.num_tokens <= length
        assert_loaded(p, d, result.num_tokens)
        num_loaded += result.num_tokens
    assert num_loaded > 0
    for one in (p, d):
        assert one.pool.num_jobs == 0
        assert one.pool.metrics.registry.get_sample_value("pdstore_slots_lent") == 0


def test_more_blocks_than_slots_pass_through_a_window_at_a_time(instance):
    p, d = (instance(fill=f, staging=f"{16 * 28}KiB") for f in (None, POISON))
    jobs = [p.pool.save(p.cache.keys([seed, *range(319)]), P_BLOCKS) for seed in range(12)]
    assert [job.wait(20).num_tokens for job in jobs] == [320] * 12
    loads = [d.pool.load(d.cache.keys([seed, *range(319)]), D_BLOCKS) for seed in range(12)]
    assert [job.wait(20).num_tokens for job in loads] == [320] * 12
    assert_loaded(p, d, 320)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"block_ids": [0, 1]}, "need 7 engine blocks"),
        ({"block_ids": [0, 1, 2, 3, 4, 5, 64]}, "not all in the cache"),
        ({"block_ids": [-1, 1, 2, 3, 4, 5, 6]}, "not all in the cache"),
        ({"first_token": 101}, "outside 100 tokens"),
        ({"first_token": -1}, "outside"),
    ],
)
@pytest.mark.parametrize("verb", ["save", "load"])
def test_arguments_that_do_not_fit_are_refused_before_anything_moves(p, verb, arguments, word):
    keys = p.cache.keys(range(100))
    with pytest.raises(LayoutError, match=word):
        getattr(p.pool, verb)(keys, **{"block_ids": P_BLOCKS, **arguments})
    assert p.pool.num_jobs == 0


def test_what_came_before_an_error_of_the_store_is_used(store, instance):
    class Partial(WrapperStore):
        def get(self, keys, slots):
            super().get(keys[:2], slots.part(0, 2))
            raise StoreUnavailable("gone", num_done=2)

    p = instance()
    save(p, range(200))
    d = instance(fill=POISON, over=Partial(store))
    result = load(d, range(200))
    assert (result.num_tokens, result.reason) == (128, Reason.STORE_DOWN)
    assert_loaded(p, d, 128)


def test_a_value_that_cannot_be_removed_is_still_only_a_miss(store, instance):
    class ReadOnlyUser(WrapperStore):
        def remove(self, keys):
            raise StoreDenied("no right to remove")

    p, d = instance(), instance(fill=POISON, over=ReadOnlyUser(store))
    save(p, range(200))
    key = p.cache.keys(range(200)).store_keys(p.layout.parts)[1]
    plant(store, key, flip(raw(store)[key], 100))
    result = load(d, range(200))
    assert (result.num_tokens, result.reason) == (64, Reason.CORRUPT)
    assert_loaded(p, d, 64)


def test_a_constructor_that_fails_leaves_nothing_open(store, monkeypatch):
    closed = []

    class Watched(WrapperStore):
        def close(self):
            closed.append(1)

    monkeypatch.setattr(
        "pdstore.worker.pool.connect_store", lambda settings, metrics: Watched(store)
    )
    settings = settings_of(staging="64KiB")
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope="")
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        KVPool(settings, layout, caches_of(layout), layout.namespace(settings, weights="w"))
    assert closed == [1]
    assert set(threading.enumerate()) <= before


def test_a_load_from_inside_an_engine_block_is_refused(d):
    with pytest.raises(LayoutError, match="multiple of 16"):
        d.pool.load(d.cache.keys(range(100)), D_BLOCKS, first_token=17)


def test_keys_of_another_namespace_are_refused(p, instance):
    other = instance(weights="v")
    with pytest.raises(LayoutError, match="another namespace"):
        p.pool.save(other.cache.keys(range(10)), P_BLOCKS)


def test_an_empty_prompt_moves_nothing(p):
    assert p.pool.save(p.cache.keys([]), []).wait(5).num_tokens == 0
    assert p.pool.load(p.cache.keys([]), []).wait(5).num_tokens == 0


def test_too_little_staging_is_refused_at_the_start(store, instance):
    with pytest.raises(ConfigError, match="PDSTORE_STAGING"):
        instance(staging="64KiB")


@pytest.mark.parametrize("required", [True, False])
def test_a_store_that_is_down_refuses_only_when_it_is_required(required, caplog):
    settings = settings_of(store="redis+unix:///nowhere/redis.sock", require_store=required)
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope="")
    namespace = layout.namespace(settings, weights="w")
    if required:
        with pytest.raises(StoreUnavailable, match=r"redis\.sock"):
            KVPool(settings, layout, caches_of(layout), namespace)
        return
    pool = KVPool(settings, layout, caches_of(layout), namespace)
    assert "serving without the pool" in caplog.text
    pool.close()


def test_close_ends_everything(instance):
    before = set(threading.enumerate())
    one = instance()
    jobs = [one.pool.save(one.cache.keys([i, *range(99)]), P_BLOCKS) for i in range(20)]
    one.close()
    one.close()
    assert all(job.done for job in jobs)
    assert set(threading.enumerate()) <= before
    assert one.pool.save(one.cache.keys(range(10)), P_BLOCKS).result.reason is Reason.CLOSED


def test_a_handoff_needs_its_own_name(p):
    keys = p.cache.keys(range(100))
    first, second = (p.cache.announce(keys)[0] for _ in range(2))
    assert isinstance(first, HandoffId)
    assert first != second
