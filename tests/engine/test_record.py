"""Records of requests, and the self-test."""

from __future__ import annotations

import time

import pytest
import torch

from pdstore import LayerSpec, Layout, open_store
from pdstore.engine.job_end import JobEnd, TimeRange
from pdstore.engine.record import Records
from pdstore.engine.request import EngineRequest
from pdstore.engine.self_test import self_test
from pdstore.errors import Direction, Reason, StoreError
from pdstore.format.handoff import HandoffId
from pdstore.settings import read_settings
from pdstore.store.optional import ListsValues
from pdstore.telemetry.request_record import Journal, RequestTimer
from tests.support.clock import Clock
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import LAYERS, eventually, settings_of

NUM_TOKENS = 100


@pytest.fixture
def journal():
    return Journal()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def records(journal, clock):
    return Records(journal, "prefill", job_timeout_s=60, clock=clock)


@pytest.fixture
def request_of(instance):
    cache = instance().cache

    def make(num_jobs, num_tokens=NUM_TOKENS, **more):
        keys = cache.keys(range(num_tokens))
        request = EngineRequest(cache, settings_of(), keys, id="cmpl-7", traceparent="00-aa-bb-01")
        for name, value in {"num_jobs": num_jobs, **more}.items():
            setattr(request, name, value)
        return request

    return make


def ended(direction, num_tokens=NUM_TOKENS, reason=None, number=None):
    at = time.time()
    ran, in_store = TimeRange(at, at + 1), TimeRange(at, at)
    return JobEnd("cmpl-7", number, direction, num_tokens, reason, ran, in_store)


def report(records, request, *ends):
    for end in ends:
        records.job_ended(request, end)


def test_a_record_waits_for_the_saves_of_every_rank(records, journal, request_of):
    handoff = HandoffId.new()
    request = request_of(4, handoff=handoff)
    eventually(request.poll)
    request.begin_step(0, 64)
    request.begin_step(64, 128)
    report(records, request, *(ended(Direction.SAVE, n, number=0) for n in (64, 48)))
    records.end_request(request)
    assert records.ended_request("cmpl-7") is request
    assert records.has_running_jobs()
    assert journal.last() == []
    report(records, request, *[ended(Direction.SAVE, number=1)] * 2)
    [record] = journal.last()
    assert not records.has_running_jobs()
    assert records.ended_request("cmpl-7") is None
    assert (record.handoff, record.num_computed, record.num_saved) == (handoff.hex, 100, 100)
    assert {phase.name for phase in record.phases} == {"wait", "compute", "save"}
    assert record.traceparent == "00-aa-bb-01"


def test_what_a_token_takes_to_compute_is_told_by_long_prompts_also_of_those_at_once(
    records, request_of, clock
):
    def computing(num_tokens):
        timer = RequestTimer(clock, arrived_at=clock.now)
        request = request_of(0, num_tokens, timer=timer)
        eventually(request.poll)
        request.begin_step(0, num_tokens)
        return request

    def computed(request):
        request.end_prompt()
        request.end()
        records.end_request(request)
        return request.cache.metrics.registry.get_sample_value("pdstore_compute_seconds_per_token")

    first, second = computing(1000), computing(1000)
    clock.now += 4.0
    assert computed(first) == pytest.approx(0.004)
    clock.now += 4.0
    assert computed(second) == pytest.approx(0.004), "4 s of its own, after those of the first"
    short = computing(20)
    clock.now += 4.0
    assert computed(short) == pytest.approx(0.004), "a step takes its time for any number of tokens"


@pytest.mark.parametrize(
    ("handoff", "num_saved"), [(None, 48), (HandoffId.new(), 100)], ids=["plain", "hand-off"]
)
def test_a_save_that_fell_short_ends_what_is_saved_but_for_a_hand_off_that_saves_it_again(
    records, journal, request_of, handoff, num_saved
):
    request = request_of(3, handoff=handoff, is_published=handoff is not None)
    saves = [
        ended(Direction.SAVE, number=7),
        ended(Direction.SAVE, 32, number=5),
        ended(Direction.SAVE, 48, Reason.LOST, number=6),
    ]
    report(records, request, *saves)
    records.end_request(request)
    [record] = journal.last()
    assert (record.num_saved, record.reason) == (num_saved, Reason.LOST)


def test_what_all_ranks_have_loaded_counts_but_for_the_token_that_is_computed_again(
    records, journal, request_of
):
    request = request_of(2, num_present=16)
    report(records, request, ended(Direction.LOAD), ended(Direction.LOAD, 64, Reason.LOST))
    records.end_request(request)
    [record] = journal.last()
    assert (record.num_loaded, record.reason) == (48, Reason.LOST)
    assert [part.name for part in record.in_store] == ["load"]


def test_a_job_that_never_ends_delays_a_record_by_its_timeout_at_most(
    records, journal, clock, request_of
):
    records.end_request(request_of(1))
    assert records.has_running_jobs()
    clock.now += 61
    assert not records.has_running_jobs()
    assert len(journal.last()) == 1


@pytest.fixture(params=["file", "redis"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/pool"
    return request.getfixturevalue("redis_server")().url


def tried(url, *, layers=LAYERS, dtype="float32", page=None, **changes):
    settings = read_settings(store=url, staging="8MiB", **changes)
    layout = Layout.of(
        settings, dtype=dtype, layers=layers, engine_block_tokens=16, rope="", page=page
    )
    self_test(settings, layout, [cache_of(spec, dtype, is_paged=bool(page)) for spec in layers])


def cache_of(spec, dtype, *, is_paged):
    """An engine's cache of a layer; in pages each head's tokens lie together."""
    heads, dtype = spec.num_kv_heads, getattr(torch, dtype)
    if is_paged:
        return torch.zeros(4, heads, 16, spec.channels, dtype=dtype).transpose(1, 2)
    return torch.zeros(4, 16, heads, spec.channels, dtype=dtype)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dtype": "bfloat16", "publish": False},
        {"layers": [LayerSpec.latent(24)] * 2},
        {"page": "packed"},
    ],
    ids=["plain", "heads first, read-only", "latent", "pages"],
)
def test_a_block_of_the_layout_comes_back_and_nothing_is_left(url, shape, closed_after):
    tried(url, **shape)
    store = closed_after(open_store(url, read_settings()))
    assert isinstance(store, ListsValues)
    assert [value.key for value in store.stored_values() if ":pool" not in value.key] == []


@pytest.mark.parametrize(
    ("bad", "step"),
    [("error_rate=1", "connect"), ("error_rate=0&miss_rate=1", "save"), ("corrupt_rate=1", "load")],
)
def test_the_step_that_failed_is_named(tmp_path, bad, step):
    rates = {"error_rate": "0", "miss_rate": "0", "corrupt_rate": "0"}
    rates |= dict(rate.split("=") for rate in bad.split("&"))
    options = "&".join(f"{name}={rate}" for name, rate in rates.items())
    with pytest.raises(StoreError, match=f"self-test's {step} failed"):
        tried(f"faulty+file://{tmp_path}/pool?{options}")
