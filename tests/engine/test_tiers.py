"""Requests over tiers: a hand-off whose prefix lies below, what waits, and what is recorded."""

from __future__ import annotations

import time

import pytest

from pdstore import EngineRequest, JobEnd, PromptTimes
from pdstore.engine.record import Records, record_of
from pdstore.metrics import METRICS
from pdstore.store.memory import MemoryStore
from pdstore.store.tier_spans import TierSpan
from pdstore.store.tiers.store import TieredStore
from pdstore.telemetry.request_record import Journal
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import get, put
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import POISON, eventually, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded

BLOCK, LEASE_S = 64, 1.0
PREFIX, PROMPT = list(range(1, 257)), list(range(1, 301))
ROOM = 320


class Stacks:
    """Stores of one process each over a first tier that all share."""

    def __init__(self, closed_after):
        self.first = MemoryStore(lease_s=LEASE_S)
        self.below = MemoryStore(lease_s=LEASE_S)
        self._closed_after = closed_after

    def open(self, below=None):
        return self._closed_after(TieredStore([self.first, below or self.below]))


@pytest.fixture
def stacks(closed_after):
    return Stacks(closed_after)


@pytest.fixture
def below(instance, stacks):
    """Puts the prefix into the lower tier, but for the blocks of these numbers; returns its keys.

    Another pool has put it there.
    """
    other = instance(over=stacks.below)
    keys = other.cache.keys(PREFIX)
    assert other.pool.save(keys, P_BLOCKS).wait(10).reason is None

    def below(*above):
        names = keys.store_keys(other.layout.parts)
        for number in above:
            assert other.pool.save(keys, P_BLOCKS).wait(10).reason is None
            move(stacks.below, stacks.first, names[number])
        return names

    below.caches = other.caches
    return below


def move(source, target, key):
    size = source.length_of(key)
    put(target, [key], get(source, [key], [size]))
    source.remove([key])


def looked_up(one, tokens=PROMPT, params=None, times=None, **settings):
    keys = one.cache.keys(tokens)
    request = EngineRequest(one.cache, settings_of(**settings), keys, params, prompt_times=times)
    eventually(request.poll)
    return request


def load(one, request, tokens=PROMPT, blocks=P_BLOCKS):
    """Loads what the request finds; returns how many tokens are there then."""
    end = request.find(0, len(tokens))
    if end:
        job = one.pool.begin_load(request.plan_load(end, ROOM), blocks)
        job.wait(10)
        request.ends.append(JobEnd.of_job(job))
    return request.end_load()


class Handing:
    """P, whose prefix lies below, step by step; and D, whose lower tier is taken away."""

    def __init__(self, instance, stacks, prefix):
        self.prefix = prefix
        self.p = instance(over=stacks.open(), role="prefill")
        self.gone = Faulty(stacks.below)
        self.d = instance(over=stacks.open(self.gone), role="decode", fill=POISON)
        self.gone.hold()
        for mine, theirs in zip(self.p.caches, prefix.caches, strict=True):
            mine[P_BLOCKS] = theirs[P_BLOCKS]
        self.request = looked_up(self.p, role="prefill")

    def prefill(self):
        """P loads the prefix, and computes and saves the rest; returns the plan of its save."""
        start = min(load(self.p, self.request), len(PROMPT) - 1)
        self.request.begin_step(start, len(PROMPT))
        plan = self.request.plan_save(start, len(PROMPT))
        self.open_save = self.p.pool.begin_save(plan, P_BLOCKS)
        return plan

    def finish(self):
        self.open_save.layers_done(len(self.p.layout.held_layers))

    def decode(self, params):
        """D takes the prompt over; returns how many tokens it computes."""
        request = looked_up(self.d, params=params, role="decode")
        num_present = load(self.d, request, blocks=D_BLOCKS)
        return len(PROMPT) - min(num_present, len(PROMPT) - 1)


@pytest.fixture
def handing(instance, stacks, below):
    def handing(*above):
        below(*above)
        made.append(one := Handing(instance, stacks, below))
        return one

    made: list[Handing] = []
    yield handing
    for one in made:
        one.gone.release()


@pytest.mark.parametrize("above", [(), (0, 1), (1, 2)], ids=["none", "first", "some"])
def test_d_finds_all_in_the_first_tier_when_p_is_done(handing, stacks, above):
    one = handing(*above)
    one.prefill()
    one.finish()
    assert one.open_save.job.wait(10).reason is None
    began = time.monotonic()
    assert one.decode(one.request.answer) == 1
    assert time.monotonic() - began < 5
    assert_loaded(one.p, one.d, len(PROMPT))


def test_d_that_follows_finds_all_in_the_first_tier(handing):
    one = handing()
    one.prefill()
    request = looked_up(one.d, params=one.request.answer, role="decode")
    assert request.found.follow is not None
    job = one.d.pool.begin_load(request.plan_load(request.find(0, len(PROMPT)), ROOM), D_BLOCKS)
    one.finish()
    assert job.wait(10).num_tokens == len(PROMPT)
    assert_loaded(one.p, one.d, len(PROMPT))


@pytest.mark.parametrize(
    ("above", "first"), [((), 0), ((0, 1), 128), ((1, 2), 0), ((0, 1, 2, 3), 256)]
)
def test_ps_first_save_begins_at_the_first_block_that_is_not_in_the_first_tier(
    handing, above, first
):
    one = handing(*above)
    plan = one.prefill()
    one.finish()  # or the pool waits for it when it is closed
    assert (plan.first_token, plan.first_save.first_token) == (first, first)


def test_what_the_engine_has_itself_goes_up_too(instance, stacks, below):
    below(0)
    p = instance(over=stacks.open(), role="prefill")
    request = looked_up(p, role="prefill")
    request.find(256, len(PROMPT))
    request.begin_step(256, 300)
    assert request.plan_save(256, 300).first_token == 64


def test_a_save_that_is_not_handed_off_begins_behind_all_that_was_found(instance, stacks, below):
    below(0)
    one = instance(over=stacks.open(), role="both")
    request = looked_up(one, role="both")
    start = load(one, request)
    request.begin_step(start, 300)
    assert (request.num_saved, request.plan_save(start, 300)) == (256, None)


def test_a_match_tells_where_its_tokens_are(instance, stacks, below):
    below(0, 3)
    found = looked_up(instance(over=stacks.open())).found
    assert found.spans == (TierSpan(0, 0, 64), TierSpan(1, 64, 192), TierSpan(0, 192, 256))
    assert (found.num_above(300), found.num_above(32)) == (64, 32)
    plain = looked_up(instance(over=stacks.first)).found
    assert (plain.spans, plain.num_above(300)) == ((), 300)


class Counting(MemoryStore):
    """Counts the keys of its searches."""

    def __init__(self, **more):
        super().__init__(**more)
        self.asked = []

    def match(self, keys):
        self.asked.append([*keys])
        return super().match(keys)

    def which_stored(self, keys):
        self.asked.append([*keys])
        return super().which_stored(keys)


class TestWhatWaits:
    @pytest.fixture
    def stacks(self, closed_after):
        stacks = Stacks(closed_after)
        stacks.below = Counting(lease_s=LEASE_S)
        return stacks

    def test_it_is_renewed_where_it_was_found_and_not_looked_for_below(
        self, instance, stacks, below
    ):
        names = below(0)
        one = instance(over=stacks.open())
        waiting = looked_up(one)
        stacks.below.asked.clear()
        eventually(lambda: len(stacks.below.asked) > 2)
        assert {tuple(keys) for keys in stacks.below.asked} == {tuple(names[1:])}
        assert waiting.find(0, len(PROMPT)) == 256
        waiting.end()

    def test_its_answer_shrinks_if_a_block_below_is_gone(self, instance, stacks, below):
        names = below(0)
        waiting = looked_up(instance(over=stacks.open()))
        stacks.below.remove(names[2:3])
        eventually(lambda: waiting.find(0, len(PROMPT)) == 128)
        waiting.end()

    def test_it_sees_what_others_save_in_the_first_tier(self, instance, stacks, below):
        below(0)
        one = instance(over=stacks.open())
        waiting = looked_up(one)
        assert one.pool.save(one.cache.keys(PROMPT), P_BLOCKS).wait(10).reason is None
        eventually(lambda: waiting.find(0, len(PROMPT)) == 256)
        instance(over=stacks.first).pool.save(one.cache.keys(PROMPT), P_BLOCKS).wait(10)
        eventually(lambda: waiting.find(0, len(PROMPT)) == 300)
        waiting.end()


def test_a_tier_without_leases_does_not_make_renewals_late(instance, stacks, below):
    """The first tier's lease is shorter than an answer may be old, and redis below gives none."""
    stacks.first, stacks.below = MemoryStore(lease_s=0.2), MemoryStore(lease_s=0.0)
    one = instance(over=stacks.open())
    one.pool.save(one.cache.keys(PROMPT), P_BLOCKS).wait(10)
    waiting = looked_up(one)
    first = waiting.found
    began = time.monotonic()
    eventually(lambda: waiting.find(0, 300) and waiting.found is not first)
    assert time.monotonic() - began < 1.5
    waiting.end()


def test_the_record_and_a_metric_name_tokens_by_tier(instance, stacks, below):
    below(0)
    one, journal = instance(over=stacks.open()), Journal()
    records = Records(journal, "both")
    request = looked_up(one)
    assert load(one, request) == 256
    request.end()
    records.end_request(request)
    [record] = journal.last()
    assert record.from_tiers == {"0 memory": 64, "1 memory": 192}
    assert "256 loaded" in record.line()
    assert "; of the loaded tokens 192 from tier 1 memory" in record.line()
    assert record.as_json()["from_tiers"] == {"0 memory": 64, "1 memory": 192}
    value = one.cache.metrics.registry.get_sample_value
    names = [{"tier": name} for name in ("0 memory", "1 memory")]
    assert [value("pdstore_tier_tokens_total", tier) for tier in names] == [64, 192]
    assert METRICS["tier_tokens"].labels == {"tier": ()}


def test_without_tiers_a_record_names_none(instance, store):
    one = instance()
    one.pool.save(one.cache.keys(PROMPT), P_BLOCKS).wait(10)
    request = looked_up(one)
    assert load(one, request) == 300
    record = record_of(request, "both")
    assert record.from_tiers == {}
    assert "tier" not in record.line()


def test_what_a_load_has_read_from_each_tier_is_measured(instance, stacks, below):
    below(0)
    one = instance(over=stacks.open(), load="auto")
    told = []

    class Told(PromptTimes):
        def decide(self, name, **more):
            told.append(more["spans"])
            return super().decide(name, **more)

        def load_ended(self, name, num_present, seconds, by_tier=None):
            told.append(by_tier)
            super().load_ended(name, num_present, seconds, by_tier)

    request = looked_up(one, times=Told("auto", BLOCK), load="auto")
    assert load(one, request) == 256
    assert told == [request.found.spans, {0: 64, 1: 192}]
