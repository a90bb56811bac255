"""Admission refuses a save where the oldest value is nearer to its next use, and nowhere else.

A save that is refused costs no copy; what another instance waits for is never refused.
"""

from __future__ import annotations

import contextlib
import random
import time
from hashlib import sha256

import pytest

from pdstore.engine.job_end import JobEnd
from pdstore.engine.request import EngineRequest
from pdstore.errors import JobResult, Reason
from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import POOL_ID_KEY
from pdstore.format.plan import PromptSave, SavePlan
from pdstore.store import open_store
from pdstore.store.admission import Admission
from pdstore.store.base import FRESH_S
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from pdstore.worker import mover
from tests.support.clock import Clock
from tests.support.kv import BLOCK_BYTES, POISON, settings_of
from tests.support.pool_kit import P_BLOCKS, assert_loaded, load, save


def names_of(number, count=20):
    return [sha256(b"%d %d" % (number, i)).digest()[:16] for i in range(count)]


def ask_in_turn(admission, clock, users, *, first=0, turns=12, step_s=1.0):
    """Each user's blocks are used once a round; nothing of them stays in the pool."""
    for _ in range(turns):
        for user in range(first, first + users):
            clock.now += step_s
            admission.saved(names_of(user))


@pytest.fixture
def clock():
    return Clock()


def test_what_is_used_in_turn_stays_until_it_is_older_than_its_next_use(clock):
    admission = Admission(clock)
    ask_in_turn(admission, clock, 30)
    assert [admission.admits(age) for age in (15.0, 28.0, 45.0, 1e6)] == [False, False, True, True]


def test_what_is_used_again_at_once_or_never_makes_plain_lru(clock):
    admission, chance = Admission(clock), random.Random(1)
    for number in range(400):
        clock.now += 1.0
        admission.saved(names_of(number))
        if chance.random() < 0.5:
            clock.now += 2.0
            admission.found(names_of(number))
    assert all(admission.admits(age) for age in (0.0, 1.0, 10.0, 100.0, 1e5))


def test_nothing_is_refused_before_anything_is_known(clock):
    assert Admission(clock).admits(0.0)


def test_another_pace_is_learnt(clock):
    admission = Admission(clock)
    ask_in_turn(admission, clock, 30)
    ask_in_turn(admission, clock, 30, first=100, turns=30, step_s=10.0)
    assert [admission.admits(age) for age in (45.0, 250.0, 450.0)] == [False, False, True]


def test_a_hot_prefix_and_pairs_of_requests_do_not_hide_a_cycle(clock):
    admission, system = Admission(clock), names_of(-1)
    for _ in range(12):
        for user in range(30):
            clock.now += 1.0
            admission.found(system)
            admission.saved(names_of(user))
            clock.now += 0.1
            admission.found(names_of(user))
    assert not admission.admits(20.0)


def test_an_age_ends_with_the_lookup_though_the_request_waits(clock):
    """What was not looked up for longer than any other value will not be used."""
    admission = Admission(clock)
    for number in range(400):
        clock.now += 1.0  # each is looked up 5 s after its last use, and waits for 25 s
        admission.saved(names_of(number % 30), waited_s=25.0)
    assert [admission.admits(age) for age in (3.0, 10.0)] == [False, True]


def test_what_was_used_since_the_lookup_is_not_used_twice(clock):
    admission = Admission(clock)
    for _ in range(30):
        for user in range(30):
            clock.now += 1.0
            admission.saved(names_of(user))
            clock.now += 2.0
            admission.found(names_of(user), waited_s=20.0)  # it came before the save
    assert [admission.admits(age) for age in (60.0, 120.0)] == [False, True]


def test_many_names_are_learnt_from_by_a_sample(clock):
    admission = Admission(clock)
    for user in [*range(300)] * 4:
        clock.now += 1.0
        admission.saved(names_of(user, 100))
    assert [admission.admits(age) for age in (200.0, 400.0)] == [False, True]


class Full(WrapperStore):
    """Has no room, and says of what would go that it was used so long ago."""

    age_s, num_puts = 5.0, 0

    def oldest_age_s(self, sizes):
        return self.age_s

    def make_room(self, keys, sizes):
        return False

    def use(self, keys):
        pass

    def put(self, keys, slots):
        self.num_puts += keys != [POOL_ID_KEY]
        return super().put(keys, slots)


@pytest.fixture
def full(store, monkeypatch):
    monkeypatch.setattr(Admission, "admits", lambda self, age_s: age_s > 10.0)
    return Full(store)


def test_a_save_that_is_not_admitted_is_not_made(full, instance):
    p = instance(over=full)
    result = save(p, range(200))
    assert (result.num_tokens, result.reason, full.num_puts) == (0, Reason.NOT_ADMITTED, 0)
    p.pool.flush(5.0)  # it is no failure
    full.age_s = None  # nothing would go
    assert save(p, range(200)).reason is None


def test_a_chain_has_no_hole(full, instance):
    p = instance(over=full)
    keys = p.cache.keys(range(192))

    def chunk(first_token, num_tokens):
        job = p.pool.save(keys.prefix(num_tokens), P_BLOCKS, first_token=first_token)
        return job.wait(10).reason

    assert chunk(0, 64) is Reason.NOT_ADMITTED
    full.age_s = 20.0
    assert chunk(64, 128) is Reason.NOT_ADMITTED
    assert [chunk(0, 64), chunk(64, 128)] == [None, None]
    full.age_s = 5.0
    assert chunk(0, 128) is None  # all of it is stored
    assert chunk(128, 192) is Reason.NOT_ADMITTED


def test_a_prompts_first_save_may_begin_behind_blocks_that_are_still_saved(full, instance):
    """Another prompt saves the prefix that both share."""
    p, full.age_s = instance(over=full), 20.0
    first_save = PromptSave(128, time.monotonic())
    plan = SavePlan(p.cache.keys(range(192)), 128, first_save=first_save)
    save = p.pool.begin_save(plan, P_BLOCKS)
    save.layers_done(3)
    assert save.job.wait(10).reason is None


def test_a_plan_tells_how_long_its_request_has_waited(instance, monkeypatch):
    waits = {"found": [], "saved": []}
    for name, of_call in waits.items():
        monkeypatch.setattr(
            Admission, name, lambda self, names, waited_s=0.0, to=of_call: to.append(waited_s)
        )
    p = instance(over=MemoryStore(budget=1 << 20))
    save(p, range(128))
    for of_call in waits.values():
        of_call.clear()
    request = EngineRequest(p.cache, settings_of(), p.cache.keys(range(200)))
    assert request.poll(10.0)
    time.sleep(0.1)
    load = p.pool.begin_load(request.plan_load(request.find(0, 200), 200), P_BLOCKS)
    assert load.wait(10).reason is None
    request.ends.append(JobEnd.of_job(load))
    assert request.end_load() == 128
    time.sleep(0.1)
    request.begin_step(128, 200)
    begun = p.pool.begin_save(request.plan_save(128, 200), P_BLOCKS)
    begun.layers_done(3)
    assert begun.job.wait(10).reason is None
    assert 0.1 <= waits["found"][0] < 10
    assert 0.2 <= waits["saved"][0] < 10


def save_by_steps(p, keys, stops):
    """Saves a prompt as an engine does that computes it in steps; loads first what is stored."""
    request = EngineRequest(p.cache, settings_of(), keys)
    assert request.poll(10.0)
    if start := request.find(0, stops[-1]):
        load = p.pool.begin_load(request.plan_load(start, stops[-1]), P_BLOCKS)
        assert load.wait(10).reason is None
        request.ends.append(JobEnd.of_job(load))
        request.end_load()
    for stop in stops:
        request.begin_step(start, stop)
        begun = p.pool.begin_save(request.plan_save(start, stop), P_BLOCKS)
        begun.layers_done(3)
        assert begun.job.wait(10) == JobResult(stop)
        start = stop
        time.sleep(FRESH_S + 0.1)


@pytest.mark.parametrize("kind", ["shm", "file", "memory"])
@pytest.mark.parametrize(
    "way", ["in one step", "in two steps", "behind what is loaded", "alone", "for a hand-off"]
)
def test_no_block_of_a_prompt_goes_before_those_behind_it(way, kind, tmp_path, instance):
    """The prompt is saved, and then others evict some of its blocks."""
    size = HEADER_BYTES + BLOCK_BYTES
    urls = {
        "shm": f"shm://order?size={20 * size >> 16 << 16}&slab=64KiB&dir={tmp_path}&lease=0.001",
        "file": f"file://{tmp_path}/pool?budget={10 * size}&lease=0.001",
        "memory": f"memory://?budget={10 * size}&lease=0.001",
    }
    with contextlib.closing(open_store(urls[kind], settings_of())) as store:
        p = instance(over=store)
        keys = p.cache.keys(range(256))
        if way in ("alone", "for a hand-off"):
            handoff = p.cache.announce(keys)[0] if way == "for a hand-off" else None
            assert save(p, range(256), handoff=handoff) == JobResult(256)
            time.sleep(FRESH_S + 0.1)
        else:
            if way == "behind what is loaded":
                save(p, range(128))
            save_by_steps(p, keys, (128, 256) if way == "in two steps" else (256,))
        stored, others = [True], 0
        while all(stored):
            others += 1000
            assert save(p, range(others, others + 64)).reason is None
            stored = store.which_stored(keys.store_keys(p.layout.parts))
        assert stored == sorted(stored, reverse=True)
        assert stored[0]


def test_what_another_instance_waits_for_is_always_admitted(full, instance):
    p = instance(over=full)
    keys = p.cache.keys(range(200))
    first = p.pool.begin_save(SavePlan(keys.prefix(128), is_awaited=True), P_BLOCKS)
    first.layers_done(3)
    assert first.job.wait(10).reason is None
    handoff, _ = p.cache.announce(keys)
    assert save(p, range(200), first_token=128, handoff=handoff).reason is None
    assert save(instance(over=full, role="prefill"), range(500, 564)).reason is None


@pytest.fixture(params=["shm", "file", "memory"])
def leased(request, tmp_path):
    """A pool with room for about 10 blocks, where all values stay leased."""
    size = HEADER_BYTES + BLOCK_BYTES
    urls = {
        "shm": f"shm://leased?size={20 * size >> 16 << 16}&slab=64KiB&dir={tmp_path}&lease=600",
        "file": f"file://{tmp_path}/pool?budget={10 * size}&lease=600",
        "memory": f"memory://?budget={10 * size}&lease=600",
    }
    with contextlib.closing(open_store(urls[request.param], settings_of())) as store:
        yield store


def test_a_hand_off_finds_room_where_all_is_leased(leased, instance):
    p, d = instance(over=leased), instance(over=leased, fill=POISON)
    users = [range(1000 * n, 1000 * n + 128) for n in range(1, 9)]
    had = [save(p, tokens) and p.cache.match(p.cache.keys(tokens)).num_tokens for tokens in users]
    assert save(p, range(9000, 9200)).reason in (Reason.STORE_FULL, Reason.NOT_ADMITTED)
    keys = p.cache.keys(range(200))
    first = p.pool.begin_save(SavePlan(keys.prefix(64), is_awaited=True), P_BLOCKS)
    first.layers_done(3)
    assert first.job.wait(10).reason is None
    handoff, params = p.cache.announce(keys)
    assert save(p, range(200), first_token=64, handoff=handoff) == JobResult(200)
    assert d.cache.lookup(keys, params).wait(10).num_tokens == 200
    assert load(d, range(200)) == JobResult(200)
    assert_loaded(p, d, 200)
    have = [p.cache.match(p.cache.keys(tokens)).num_tokens for tokens in users]
    lost = [before - now for before, now in zip(had, have, strict=True)]
    assert lost[0] == 128, "it was used longest ago"
    assert 0 < sum(lost) <= 256
    assert lost == sorted(lost, reverse=True)


def test_hand_offs_that_are_saved_at_once_all_find_room(tmp_path, instance):
    url = f"file://{tmp_path}/pool?budget={400 * (HEADER_BYTES + BLOCK_BYTES)}&lease=600"
    with contextlib.closing(open_store(url, settings_of())) as store:
        p, jobs = instance(over=store, workers=4, staging="64MiB"), []
        for n in range(1, 81):
            keys = p.cache.keys(range(10_000 * n, 10_000 * n + 1280))
            handoff, _ = p.cache.announce(keys)
            jobs.append(p.pool.save(keys, [i % 60 for i in range(80)], handoff=handoff))
            jobs[max(0, n - 4)].wait(10)
            p.cache.match(keys)
        assert {job.wait(10).reason for job in jobs} == {None}


@pytest.mark.parametrize("leased", ["shm"], indirect=True)
def test_a_share_is_saved_in_one_call_again_when_room_was_made(leased, instance, monkeypatch):
    p, fill, calls = instance(over=leased), leased.fill, []
    for n in range(1, 9):
        save(p, range(1000 * n, 1000 * n + 128))
        p.cache.match(p.cache.keys(range(1000 * n, 1000 * n + 128)))
    monkeypatch.setattr(leased, "fill", lambda batches: calls.append(batches) or fill(batches))
    handoff, _ = p.cache.announce(p.cache.keys(range(320)))
    assert save(p, range(320), handoff=handoff) == JobResult(320)
    assert len(calls) == 2


def test_a_hand_off_larger_than_the_pool_evicts_nothing_leased(leased, instance):
    p = instance(over=leased)
    save(p, range(5000, 5128))
    keys = p.cache.keys(range(1280))
    handoff, _ = p.cache.announce(keys)
    result = p.pool.save(keys, [n % 60 for n in range(80)], handoff=handoff).wait(10)
    assert result.reason is Reason.STORE_FULL
    assert p.cache.match(p.cache.keys(range(5000, 5128))).num_tokens == 128


def test_users_in_turn_find_in_a_small_pool_what_it_holds(clock, instance, monkeypatch):
    """LRU would find nothing: each block goes a few requests before its next use."""
    monkeypatch.setattr(mover, "Admission", lambda: Admission(clock))
    room = 27 * (HEADER_BYTES + BLOCK_BYTES)
    p = instance(over=MemoryStore(budget=room, lease_s=0.5, clock=clock))
    found = []
    for turn in range(16):
        for user in range(12):
            clock.now += 5.0
            keys = p.cache.keys(range(1000 * user, 1000 * user + 192))
            match = p.cache.match(keys)
            found.append(match.num_tokens // 64)
            if match.num_tokens:
                assert p.pool.load(match.keys, P_BLOCKS).wait(10).reason is None
            if match.num_tokens < 192:
                p.pool.save(keys, P_BLOCKS, first_token=match.num_tokens).wait(10)
        if turn < 2:
            assert not any(found[-12:])
    assert sum(found[-48:]) > 48 * 3 / 2
