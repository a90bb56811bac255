"""The connector's hooks, and what the scheduler tells the worker to save."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.worker import kv_connector_model_runner_mixin as runner
from vllm.v1.worker.gpu import kv_connector as gpu_runner

from pdstore import HandoffId
from pdstore.adapters.vllm import PDStoreConnector
from pdstore.adapters.vllm.messages import LoadSpec, PDStoreConnectorMetadata, SaveSpec
from pdstore.adapters.vllm.saves import Saves
from pdstore.engine.request import EngineRequest
from pdstore.errors import SwapError
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.plan import LoadPlan, SavePlan
from tests.adapters.vllm.standins import GROUP, BlockPool
from tests.adapters.vllm.test_walk import Engine
from tests.support.kv import Instance, eventually, settings_of

BLOCK, PROMPT = 64, list(range(1, 301))
TABLE = [10, 11, 12, 13, 14, 15, 16, 17]


@pytest.fixture
def pool():
    return BlockPool()


@pytest.fixture
def asked():
    """vLLM's request of the prompt."""
    return SimpleNamespace(num_computed_tokens=0, num_tokens=len(PROMPT))


@pytest.fixture
def state_of(instance):
    def make(handoff=None, **settings):
        cache = instance.cache
        settings = settings_of(**settings)
        state = EngineRequest(cache, settings, cache.keys(PROMPT), id="r", may_load=False)
        state.handoff = handoff
        return state

    return make


def saves_of(pool, num_ranks=1, table=TABLE):
    saves = Saves(num_ranks, pool, BLOCK)
    ids = SimpleNamespace(get_block_ids={"r": [table]}.get)
    saves.begin_step(SimpleNamespace(kv_connector_block_state=ids))
    return saves


def compute(saves, state, asked, *chunks):
    """The saves of a request that is computed in these chunks."""
    specs = []
    for num_tokens in chunks:
        start = asked.num_computed_tokens
        state.begin_step(start, start + num_tokens)
        specs += saves.plan(state, asked, num_tokens)
        asked.num_computed_tokens += num_tokens
    return specs


def test_blocks_that_a_window_has_left_are_no_blocks(pool, state_of, asked):
    saves = saves_of(pool, table=[0, 0, *TABLE])
    [save] = compute(saves, state_of(), asked, 300)
    assert list(save.block_ids[0]) == [NO_BLOCK, NO_BLOCK, *TABLE[:2]]
    assert pool.held == TABLE[:2]


@pytest.mark.requirement("R-X-4", "a save holds its blocks until it has read them")
def test_a_save_holds_its_new_blocks_until_every_rank_has_read_them(pool, state_of, asked):
    saves = saves_of(pool, num_ranks=2)
    [first, second] = compute(saves, state_of(), asked, 128, 128)
    assert pool.held == TABLE[:2] + TABLE[2:4]
    saves.release_blocks({first.number: 1})
    assert pool.held == TABLE[:4]
    saves.release_blocks({first.number: 1, 99: 1})
    assert pool.held == TABLE[2:4]
    saves.release_blocks({second.number: 2})
    assert pool.held == []
    assert len(saves) == 0


def step(new=(), cached=(), resumed=(), **more):
    """A step of a vLLM that says what it adds: pairs of a request and its new blocks."""
    return SimpleNamespace(
        **more,
        scheduled_new_reqs=[SimpleNamespace(req_id=id, block_ids=ids) for id, ids in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[id for id, _ in cached],
            new_block_ids=[ids for _, ids in cached],
            resumed_req_ids=set(resumed),
        ),
    )


@pytest.mark.parametrize(
    ("steps", "table"),
    [
        ([{"new": [("r", ([1, 2],))]}, {"cached": [("r", ([3],))]}, {"cached": [("r", None)]}],
         [1, 2, 3]),
        ([{"new": [("r", ([1, 2],))]}, {"cached": [("r", ([7, 8, 9],))], "resumed": ["r"]}],
         [7, 8, 9]),
    ],
    ids=["added", "preempted"],
)  # fmt: skip
@pytest.mark.parametrize("state", [{}, {"kv_connector_block_state": SimpleNamespace(block_ids={})}])
def test_what_an_older_vllm_adds_is_put_together(pool, state_of, asked, steps, table, state):
    """state: what vLLM 0.29 says of a step that adds no blocks."""
    saves = Saves(1, pool, BLOCK)
    for each in steps:
        saves.begin_step(step(**each, **state))
    state = state_of()
    [save] = compute(saves, state, asked, 192)
    assert list(save.block_ids[0]) == table
    saves.forget("r")
    assert compute(saves, state, asked, 108) == []


IDS = list(range(1, 21))


def test_every_hook_of_a_running_engine_is_guarded():
    """Hooks that only pass a call on to a guarded one, or cannot fail, need no guard."""
    hooks = """on_new_request get_num_new_matched_tokens update_connector_output request_finished
        has_pending_push_work has_pending_block_frees reset_cache _begin_step wait_for_save
        get_block_ids_with_load_errors build_connector_worker_meta
        get_kv_connector_stats shutdown _load save_kv_layer _end_loads"""
    for name in hooks.split():
        assert hasattr(getattr(PDStoreConnector, name), "__wrapped__"), name


def test_sleep_mode_is_not_supported():
    assert PDStoreConnector.supports_sleep_mode() is False


@pytest.fixture
def connector(instance, monkeypatch):
    return connector_on(instance, monkeypatch)


def connector_on(instance, monkeypatch):
    """A worker's connector on the instance's pool, as vLLM's model runner calls it."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, kv_role="kv_both"),
        parallel_config=SimpleNamespace(world_size=1),
        max_concurrent_batches=1,
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
    )
    caches = SimpleNamespace(kv_cache_groups=[GROUP], num_blocks=64)
    connector = PDStoreConnector(config, KVConnectorRole.WORKER, caches)
    connector.worker.use_pool(instance.pool, layers=["a", "b", "c"])
    monkeypatch.setattr(runner, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(runner, "get_forward_context", lambda: None)
    return connector


def test_a_hook_that_fails_answers_as_a_miss_and_is_counted(connector, monkeypatch):
    monkeypatch.setattr(connector.worker, "end_loads", None)
    connector.metrics.pop()
    assert connector.get_finished(set()) == (None, set())
    assert connector.metrics.pop().data["misses|fault"] == 1


def test_a_fault_costs_the_saves_of_its_step_and_not_the_loads(tmp_path):
    engine = Engine(f"shm://p?size=8MiB&dir={tmp_path}", "both")
    side = engine.scheduler
    side.scheduler.fail_load("r", [[1, 2]], 16)
    unknown = SimpleNamespace(num_scheduled_tokens={"r": 1})  # it tells nothing of blocks
    assert len(side.build_connector_meta(unknown).loads) == 1
    assert side.metrics.pop().data["misses|fault"] == 1
    engine.close()


def test_an_interrupt_is_not_a_fault(connector, monkeypatch):
    def interrupt(finished):
        raise KeyboardInterrupt

    monkeypatch.setattr(connector.worker, "end_loads", interrupt)
    with pytest.raises(KeyboardInterrupt):
        connector.get_finished(set())


def step_with(saves=(), loads=()):
    """What vLLM's scheduler gives its runner: no load is synchronous."""
    return SimpleNamespace(
        kv_connector_metadata=PDStoreConnectorMetadata(saves=list(saves), loads=list(loads)),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )


def run_step(connector, *saves, error=None, is_left_open=False):
    """A step of vLLM's runner; behind its first layer the forward raises `error`."""
    step = step_with(saves)
    forward = runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
    with forward(step, defer_finalize=is_left_open):
        connector.save_kv_layer("a", None, None)
        if error is not None:
            raise error


def test_a_step_saves_what_it_computes_also_while_its_caller_handles_an_error(connector, instance):
    keys = instance.cache.keys(range(200))
    whole = keys.store_keys(instance.namespace.parts)
    try:
        raise ValueError("the caller's")
    except ValueError:
        run_step(connector, SaveSpec(7, "request", SavePlan(keys, 0), [IDS]))
    eventually(lambda: instance.store.match(whole) == len(whole))


def test_layers_that_a_failed_forward_has_not_computed_are_not_saved(connector, instance):
    """vLLM's runner ends a step's saves whether its forward has failed or not."""
    keys, handoff = instance.cache.keys(range(200)), HandoffId.new()
    with pytest.raises(MemoryError):
        run_step(
            connector,
            SaveSpec(7, "request", SavePlan(keys, 0, handoff), [IDS]),
            error=MemoryError("no room"),
        )
    failed = [handoff.failed(instance.namespace)]
    eventually(lambda: instance.store.match(failed))
    assert not instance.store.match(keys.store_keys(instance.namespace.parts))


@pytest.fixture(params=["runner V1", "runner V2"])
def forward(request, monkeypatch):
    """A step of either of vLLM's runners; its caller stands for the forward pass."""
    monkeypatch.setattr(gpu_runner, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(gpu_runner, "get_forward_context", lambda: None)
    monkeypatch.setattr(gpu_runner, "kv_transfer_state", SimpleNamespace())

    @contextlib.contextmanager
    def run_v2(step):
        calls = object.__new__(gpu_runner.ActiveKVConnector)
        calls.kv_connector = runner.get_kv_transfer_group()
        calls.set_disabled(False)
        calls.pre_forward(step)
        yield
        calls.finish_forward()
        calls.post_forward(step.finished_req_ids)

    run_v1 = runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
    return run_v2 if request.param == "runner V2" else run_v1


def test_layers_are_saved_before_their_forward_pass_ends(store, forward, monkeypatch, closed_after):
    """Both runners start the loads of a step only then."""
    monkeypatch.setattr("pdstore.store.transfer.Split.early_bytes", 0)  # these ranges are small
    instance = closed_after(Instance(store, layer_ranges=2))
    connector = connector_on(instance, monkeypatch)
    keys = instance.cache.keys(range(200))
    whole = keys.store_keys(instance.namespace.parts)
    first = keys.store_keys([part for part in instance.namespace.parts if part.group == 0])
    with forward(step_with(saves=[SaveSpec(7, "request", SavePlan(keys, 0), [IDS])])):
        connector.save_kv_layer("a", None, None)
        connector.save_kv_layer("b", None, None)
        eventually(lambda: instance.store.match(first) == len(first))
        assert instance.store.match(whole) < len(whole), "layer c is not computed yet"
        connector.save_kv_layer("c", None, None)
    eventually(lambda: instance.store.match(whole) == len(whole))


class Earlier:
    """Stands for the event behind the GPU's work before a step."""

    def __init__(self):
        self._fired = threading.Event()
        self.fire = self._fired.set
        self.query = self._fired.is_set

    def synchronize(self):
        assert self._fired.wait(10)


def test_a_load_begins_behind_its_step_s_launch_and_waits_for_earlier_steps_only(
    connector, instance, forward, monkeypatch
):
    """Else its threads take the GIL from the one that launches, or it waits for the forward too."""
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    connector.worker.loads_need_no_event = False
    events, begun = [], []
    begin_load = instance.pool.begin_load
    monkeypatch.setattr(
        instance.pool,
        "begin_load",
        lambda *args, **named: begun.append(1) or begin_load(*args, **named),
    )
    monkeypatch.setattr(
        instance.pool, "caller_event", lambda: events.append(Earlier()) or events[-1]
    )
    with forward(step_with(loads=[LoadSpec("request", LoadPlan(keys, 0, 200), [IDS])])):
        assert (len(events), begun) == (1, [])
    assert (len(events), begun) == (1, [1])
    assert not connector.worker.end_loads()[0]
    events[0].fire()
    eventually(lambda: connector.worker.end_loads()[0] == {"request"})


def test_a_load_whose_earlier_work_cannot_be_told_is_reported_all_the_same(
    connector, instance, forward, monkeypatch
):
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    connector.worker.loads_need_no_event = False
    caller_event = instance.pool.caller_event
    answers = iter([SwapError("captured"), caller_event()])

    def fails_once():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(instance.pool, "caller_event", fails_once)
    with forward(step_with(loads=[LoadSpec("request", LoadPlan(keys, 0, 200), [IDS])])):
        pass
    eventually(lambda: connector.worker.end_loads() == ({"request"}, set()))
