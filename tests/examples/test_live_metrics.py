"""No metric of the table is dead: P and D move each of them, in hand-offs and in trouble."""

from __future__ import annotations

import itertools

import pytest

from pdstore.format.handoff import HandoffId
from pdstore.metrics import METRICS, Kind
from tests.support import redis_gate
from tests.support.mini_engine_kit import PULL, Gate, ask, hand_over, pd_of, prompt_of, until

LONG = 300
OF_TIERS = {name for name in METRICS if name.startswith("tier_")}


class Seen:
    """The metrics that were not 0 in any scrape of some engines; `dead` are the others."""

    def __init__(self, *engines):
        self._engines = engines
        self._alive = set()

    @property
    def dead(self):
        for engine in self._engines:
            for family in engine.counters.registry.collect():
                metric = METRICS.get(family.name.removeprefix("pdstore_"))
                if metric is not None:
                    end = "_count" if metric.kind is Kind.HISTOGRAM else ""
                    shown = [s.value for s in family.samples if s.name == metric.shown_name + end]
                    self._alive |= {metric.name} if any(shown) else set()
        return METRICS.keys() - self._alive

    def until(self, *names):
        try:
            until(lambda: not self.dead & set(names))
        except AssertionError:
            raise AssertionError(f"never seen: {set(names) & self.dead}") from None


def published(p, prompt):
    """Lets P prefill a prompt, and waits until its marker is there."""
    params = hand_over(p, prompt)
    handoff = params["pdstore"]["attempt"]
    until(lambda: any(record.handoff == handoff for record in p.adapter.journal.last()))
    return params


@pytest.fixture
def open_one(open_engine):
    def open_one(role, store, **changes):
        pd = pd_of(role, store, deadline_s=1.0, workers=2, **changes)
        return open_engine("llama", pd, num_blocks=256)

    return open_one


def test_p_and_d_move_every_metric(open_one, redis_server, monkeypatch):
    redis = redis_server("--maxmemory", "64mb")
    door = redis_gate.Gate(redis.port)
    p = open_one("prefill", door.url)
    d = open_one("decode", f"faulty+{redis.url}?miss_rate=0.2", load="auto")
    seen = Seen(p, d)

    ask(d, prompt_of(LONG)).wait()
    for seed in range(3):  # what is decided, and by which estimates
        prompt = prompt_of(LONG, seed)
        ask(d, prompt, kv_transfer_params=published(p, prompt)).wait()
    seen.until("store_codes", "store_used_bytes", "store_capacity_bytes")

    gate = Gate(p, monkeypatch)
    params = {"pdstore": {"attempt": HandoffId.new().hex}}
    prompt = prompt_of(LONG, 99)
    first = ask(p, prompt, max_tokens=1, kv_transfer_params=PULL | params)
    second = ask(d, prompt, kv_transfer_params=params)
    gate.wait_for_step()
    for _ in range(4):
        gate.open(1)
    gate.open()
    first.wait()
    second.wait()

    door.hold(redis_gate.SAVE)
    asked = [ask(p, prompt_of(LONG, 200 + n), max_tokens=1) for n in range(6)]
    seen.until("jobs_alive", "slots_lent", "queue_jobs", "queue_bytes", "hung_store_calls")
    door.close()
    redis.stop()
    for one in asked:
        one.wait()
    until(lambda: ask(d, prompt_of(40, 300)).wait() and "breaker_open" not in seen.dead)
    elsewhere = {
        "store_evictions": "asked for every 15 s: tests/store/test_room_watch.py",
        "compute_seconds_per_token": "no prompt here is long enough: tests/engine/test_record.py",
    }
    assert seen.dead - OF_TIERS == elsewhere.keys(), elsewhere
    assert seen.dead >= OF_TIERS, "this pool has one store"


def test_p_and_d_over_tiers_move_every_metric_of_tiers(open_one, redis_server, tmp_path):
    redis = redis_server("--maxmemory", "64mb")
    url = f"file://{tmp_path}/above?budget=1GiB {redis.url}"
    p = open_one("prefill", url)
    d = open_one("decode", url)
    seen = Seen(p, d)
    prompt = prompt_of(LONG)
    ask(d, prompt, kv_transfer_params=published(p, prompt)).wait()
    seen.until(*OF_TIERS - {"tier_out", "tier_waiting_bytes", "tier_evictions"})
    redis.stop()
    seeds = itertools.count(1)
    until(lambda: published(p, prompt_of(LONG, next(seeds))) and "tier_out" not in seen.dead)
    published(p, prompt_of(LONG, 100))
    seen.until("tier_waiting_bytes")
    assert seen.dead & OF_TIERS == {"tier_evictions"}, "tests/store/tiers/test_shown.py"
