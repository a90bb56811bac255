"""PDStoreConnectorWorker on a real pool: it reports every outcome and keeps nothing."""

from __future__ import annotations

import inspect
import re
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from pdstore.adapters.vllm import worker as worker_module
from pdstore.adapters.vllm.messages import LoadSpec, PDStoreConnectorMetadata, SaveSpec
from pdstore.adapters.vllm.weights import WeightsWatch
from pdstore.adapters.vllm.worker import PDStoreConnectorWorker
from pdstore.errors import Reason
from pdstore.format.handoff import HandoffId
from pdstore.format.plan import Announcement, LoadPlan, SavePlan
from tests.adapters.vllm.standins import GROUP, vllm_config
from tests.support.kv import Instance, eventually, settings_of
from tests.support.states import StateInstance

IDS = list(range(1, 21))


def begin_saves(worker, *saves):
    worker.start_saves(PDStoreConnectorMetadata(saves=list(saves)))


def begin_loads(worker, *loads, aborted=()):
    """Starts loads in a step that is launched then."""
    worker.start_loads(PDStoreConnectorMetadata(loads=list(loads), aborted_handoffs=list(aborted)))
    worker.begin_loads()


def save(worker, *saves):
    """Saves in a step whose layers are not reported."""
    begin_saves(worker, *saves)
    worker.open_saves.end_step()


def test_a_save_is_released_once_and_then_forgotten(worker, instance):
    keys = instance.cache.keys(range(200))
    save(worker, SaveSpec(7, "request", SavePlan(keys, 0), [IDS]))
    released = 0

    def is_forgotten():
        nonlocal released
        report = worker.pop_report()
        released += report.released[7] if report else 0
        return worker.is_idle

    eventually(is_forgotten)
    assert released == 1


def load(worker, spec):
    """Loads; returns whether the load has failed."""
    begin_loads(worker, spec)
    [(loaded, failed)] = eventually(lambda: [each for each in [worker.end_loads()] if each[0]])
    assert loaded == {"request"}
    return failed == {"request"}


@pytest.mark.parametrize(
    ("num_stored", "num_tokens", "bad"),
    [(200, 200, []), (128, 160, IDS[8:10]), (None, 160, IDS[:10])],
    ids=["all", "less than vLLM counts on", "nothing was to be loaded"],
)
def test_a_load_reports_the_blocks_that_it_did_not_fill(
    worker, instance, num_stored, num_tokens, bad
):
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    plan = None if num_stored is None else LoadPlan(keys.prefix(num_stored), 0, num_tokens)
    has_failed = load(worker, LoadSpec("request", plan, [IDS[: -(-num_tokens // 16)]]))
    assert has_failed == bool(bad)
    assert worker.pop_bad_blocks() == set(bad)
    value = instance.pool.metrics.registry.get_sample_value
    assert not value("pdstore_misses_total", {"reason": "fault"}), "it was able to begin"


def test_a_load_of_a_request_that_has_ended_is_cancelled(worker, instance):
    keys, missing = instance.cache.keys(range(200)), HandoffId.new()
    spec = LoadSpec("request", LoadPlan(keys, 0, 200, missing), [IDS])
    begin_loads(worker, spec)
    assert worker.end_loads() == (set(), set()), "its blocks are written until it has ended"
    eventually(lambda: worker.end_loads({"request"})[0])
    [end] = worker.pop_report().ended
    assert end.reason is Reason.CANCELLED


class Clock:
    """A clock that goes on by 8 ms whenever it is read."""

    def __init__(self):
        self.ticks = 0

    def monotonic(self):
        self.ticks += 1
        return self.ticks / 128


@pytest.mark.parametrize(
    ("num_left", "ends_with_it", "polls"),
    [(64, False, 2), (64, True, 1), (1, False, 1)],
    ids=["waits as long again as it took", "all have ended", "one token is left"],
)
def test_a_load_that_leaves_a_prefill_is_reported_with_those_that_began_with_it(
    worker, instance, monkeypatch, num_left, ends_with_it, polls
):
    """Their prompts then share a step. The other load waits for a hand-off that never comes."""
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    clock = Clock()
    monkeypatch.setattr(worker_module, "time", clock)
    plan = LoadPlan(keys, 0, 200)
    if not ends_with_it:
        plan = LoadPlan(instance.cache.keys(range(1, 201)), 0, 200, HandoffId.new())
    other = LoadSpec("other", plan, [IDS], num_left)
    one = LoadSpec("one", LoadPlan(keys.prefix(64), 0, 64), [IDS], num_left)
    begin_loads(worker, one, other)  # ticks 1 and 2
    eventually(lambda: clock.ticks == (4 if ends_with_it else 3))
    time.sleep(0.05)  # what the tick was for
    ended: set[str] = set()
    reports = 0
    while "one" not in ended:
        ended |= worker.end_loads()[0]
        reports += 1
    assert reports == polls
    assert ("other" in ended) == ends_with_it
    worker.end_loads({"other"})


def test_with_a_window_a_load_fails_whole(worker, instance):
    object.__setattr__(instance.namespace, "needs", {0: 64})
    worker.use_pool(instance.pool)
    assert load(worker, LoadSpec("request", None, [IDS[4:10]]))
    bad = worker.pop_bad_blocks()
    assert not bad, "vLLM would go on behind blocks that it has given back"


@pytest.mark.parametrize(
    ("config", "needs", "at_once"),
    [
        ({}, {}, True),
        ({"batches": 2}, {}, True),
        ({"batches": 2, "is_consumer": False}, {}, False),
        ({"batches": 1, "is_consumer": False}, {}, True),
        ({}, {0: 64}, False),
    ],
    ids=["no overlap", "kept by vLLM", "not kept in a producer", "a producer", "a window"],
)
def test_a_load_begins_behind_the_launch_of_its_step_and_waits_for_earlier_ones_if_it_must(
    worker, instance, monkeypatch, config, needs, at_once
):
    object.__setattr__(instance.namespace, "needs", needs)
    worker.vllm_config = vllm_config(**config)
    worker.use_pool(instance.pool)
    worker.vllm_config = None  # no step may ask it: an answer took 10 ms
    keys = instance.cache.keys(range(200))
    spec = LoadSpec("request", LoadPlan(keys, 0, 200), [IDS])
    told = []
    monkeypatch.setattr(instance.pool, "caller_event", lambda: told.append(1))
    worker.start_loads(PDStoreConnectorMetadata(loads=[spec]))
    assert bool(told) == (not at_once), "of the work that is queued before the step"
    assert instance.pool.num_jobs == 0, "it begins when its step is launched"
    worker.begin_loads()
    eventually(lambda: worker.end_loads()[0])


def test_vllm_keeps_blocks_until_the_step_in_flight_is_over():
    from vllm.v1.core.sched.scheduler import Scheduler

    said = inspect.getsource(Scheduler.__init__)
    assert re.search(r"kv_transfer_config.is_kv_consumer:\s+self.defer_block_free = True", said)


def test_a_layer_range_is_stored_while_the_model_computes_the_next(store, monkeypatch):
    """From then on D may follow the hand-off."""
    monkeypatch.setattr("pdstore.store.transfer.Split.early_bytes", 0)  # these ranges are small
    instance = Instance(store, layer_ranges=2)
    cache = SimpleNamespace(kv_cache_groups=[GROUP], num_blocks=64)
    worker = PDStoreConnectorWorker(settings_of(), vllm_config(), cache, instance.pool.metrics)
    worker.use_pool(instance.pool, layers=["a", "b", "c"])
    handoff, keys = HandoffId.new(), instance.cache.keys(range(200))
    first = keys.store_keys([part for part in instance.namespace.parts if part.group == 0])
    whole = keys.store_keys(instance.namespace.parts)
    plan = SavePlan(keys, 0, handoff, announce=Announcement(handoff, 200))
    begin_saves(worker, SaveSpec(7, "request", plan, [IDS]))
    worker.open_saves.layer_done("a")
    worker.open_saves.layer_done("b")
    eventually(lambda: store.match(first) == len(first))
    eventually(lambda: store.match([handoff.started(instance.namespace)]))
    assert store.match(whole) < len(whole), "layer c is not computed yet"
    assert worker.pop_report() is None, "the blocks are still needed"
    worker.open_saves.layer_done("c")
    worker.open_saves.end_step()
    eventually(lambda: store.match(whole) == len(whole))
    eventually(lambda: store.match([handoff.done(instance.namespace, 0)]))
    instance.close()


def test_what_cannot_begin_takes_nothing_else_with_it(worker, instance, caplog):
    keys, ids = instance.cache.keys(range(200)), [HandoffId.new() for _ in range(3)]
    bad, good, aborted = ids
    save(
        worker,
        SaveSpec(1, "bad", SavePlan(keys, 0, bad), [[999] * 20]),
        SaveSpec(2, "good", SavePlan(keys, 0, good), [IDS]),
    )
    ends = [bad.failed(instance.namespace), good.done(instance.namespace, 0)]
    eventually(lambda: all(instance.store.match([end]) for end in ends))
    eventually(lambda: worker.pop_report() is None and worker.is_idle)
    assert "LayoutError" in caplog.text
    loads = [
        LoadSpec("bad", LoadPlan(keys, 0, 200), [[999] * 20]),
        LoadSpec("good", LoadPlan(keys, 0, 200), [IDS]),
    ]
    begin_loads(worker, *loads, aborted=[aborted])
    ended, failed = set(), set()

    def are_over():
        for all_of, new in zip((ended, failed), worker.end_loads(), strict=True):
            all_of |= new
        return len(ended) == 2

    eventually(are_over)
    assert failed == {"bad"}
    assert {end.reason for end in worker.pop_report().ended} == {None, Reason.FAULT}
    eventually(lambda: instance.store.match([aborted.failed(instance.namespace)]))


@pytest.fixture
def model(worker):
    """A model whose weights the worker watches."""
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    worker.watch_weights(WeightsWatch([model]))
    return model


def test_after_weights_were_written_a_rank_refuses_what_was_planned_before(worker, instance, model):
    keys, handoff = instance.cache.keys(range(200)), HandoffId.new()
    instance.pool.save(keys, IDS).wait(10)
    model.weight.add_(1)
    loads = [LoadSpec("request", LoadPlan(keys, 0, 200), [IDS])]
    saves = [SaveSpec(7, "save", SavePlan(instance.cache.keys(range(90)), 0, handoff), [IDS])]
    metadata = PDStoreConnectorMetadata(loads=loads, saves=saves, step=3)
    worker.notice_writes(metadata)
    worker.start_saves(metadata)
    assert load(worker, loads[0]), "none of its tokens counts"
    report = worker.pop_report()
    assert (report.weights[0].generation, report.weights[0].since) == (1, 3)
    assert {end.request_id: end.reason for end in report.ended} == {
        "request": Reason.NAMESPACE,
        "save": Reason.CANCELLED,
    }
    assert report.released == {7: 1}
    failed = handoff.failed(instance.namespace)
    eventually(lambda: instance.store.match([failed]) == 1)
    assert not load(worker, LoadSpec("request", LoadPlan(keys, 0, 200), [IDS], weights={0: 1}))


def test_a_load_that_runs_while_weights_are_written_does_not_count(worker, instance, model):
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    begin_loads(worker, LoadSpec("request", LoadPlan(keys, 0, 200), [IDS]))
    model.weight.add_(1)
    worker.notice_writes(PDStoreConnectorMetadata(question=1))
    assert eventually(lambda: worker.end_loads()[1]) == {"request"}


def state_groups():
    """vLLM's KV groups of a model with states in blocks of 64 tokens, whose tables come first."""
    state = MambaSpec(
        block_size=64, shapes=((96,),), dtypes=(torch.int8,), mamba_cache_mode="align"
    )
    full = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=8, dtype=torch.float32)
    return [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate((state, state, full))]


def state_worker(instance):
    """A worker on an engine with 24 blocks of 64 tokens, of four rows each."""
    caches = SimpleNamespace(kv_cache_groups=state_groups(), num_blocks=24)
    worker = PDStoreConnectorWorker(settings_of(), vllm_config(), caches, instance.pool.metrics)
    worker.use_pool(instance.pool, rows_per_block=4)
    return worker


@pytest.mark.parametrize("has_state", [True, False])
def test_a_state_fills_one_row_and_a_block_of_tokens_four(store, closed_after, has_state):
    p, d = (closed_after(StateInstance(store)) for _ in range(2))
    keys, handoff = p.cache.keys(range(299)), HandoffId.new()
    saver, loader = state_worker(p), state_worker(d)
    assert saver.handshake().block_tokens == 64
    assert saver.handshake().states.numbers == {0, 1}
    tables = [{299: 20}, {299: 21}, [3, 4, 5, 6, 7]]
    save(saver, SaveSpec(7, "request", SavePlan(keys, 0, handoff), tables))
    eventually(lambda: saver.pop_report() is None and saver.is_idle)
    assert store.match([handoff.done(p.namespace, 0)])
    if not has_state:
        parts = [part for part in d.namespace.parts if part.group in d.namespace.states]
        store.remove(keys.store_keys(parts))
    there = [{299: 2}, {299: 1}, [9, 8, 12, 11, 10]]
    has_failed = load(loader, LoadSpec("request", LoadPlan(keys, 0, 299), there))
    assert has_failed is not has_state
    assert not loader.pop_bad_blocks(), "vLLM takes no blocks of several KV groups"
    if has_state:
        assert torch.equal(d.caches[0][2], p.caches[0][20])
        assert torch.equal(d.caches[2][1], p.caches[2][21])
        assert torch.equal(d.caches[1][36:40], p.caches[1][12:16])
