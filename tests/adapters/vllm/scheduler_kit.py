"""The connector's scheduler side as vLLM drives it: requests, steps, and answers to lookups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore import Layout
from pdstore.adapters.vllm.messages import PDStoreConnectorMetadata, RankLayout
from pdstore.adapters.vllm.scheduler import PDStoreConnectorScheduler
from pdstore.adapters.vllm.stats import StepMetrics
from pdstore.adapters.vllm.tables import StateTables
from tests.adapters.vllm.standins import BlockPool
from tests.support.kv import LAYERS, eventually, settings_of
from tests.support.states import ENTRIES, NO_WINDOW

BLOCK, PROMPT = 64, list(range(1, 301))
TABLE = [10, 11, 12, 13, 14]
STATES = StateTables(frozenset({0, 1}), BLOCK, keeps_ends=True)
"""The block tables of a model with states, as vLLM lays them out with prefix caching."""
ONE_STATE = StateTables(frozenset({0, 1}), 2048, keeps_ends=False)
"""The same without prefix caching: a request has one state, which each step overwrites."""
OPTIONS = (
    *("may_follow", "step_timeout_s", "longest_prompt", "longest_drafted", "weights_of"),
    *("num_ranks", "contents", "events"),
)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/pool"


def namespace_of(settings, weights="w", states=None, page=None):
    layout = Layout.of(
        settings,
        dtype="float32",
        layers=NO_WINDOW if states else LAYERS,
        engine_block_tokens=BLOCK if page or not states else ENTRIES[:3],
        rope="",
        page=page,
        boundary_tokens=BLOCK if states else None,
    )
    return layout.namespace(settings, weights=weights)


@pytest.fixture
def scheduler_of(url, closed_after):
    """Makes schedulers that have begun: `scheduler_of(role="prefill")`.

    small: tokens of one of vLLM's blocks, where a block of the pool has several.
    """

    def make(*, metrics=None, states=None, page=None, small=BLOCK, block_pool=None, **changes):
        given = {name: changes.pop(name) for name in OPTIONS if name in changes}
        settings = settings_of(**{"store": url, **changes})
        num_ranks, metrics = given.pop("num_ranks", 1), metrics or StepMetrics()
        scheduler = PDStoreConnectorScheduler(settings, num_ranks, metrics, **given)
        scheduler.saves.block_pool = block_pool or BlockPool()
        namespace = namespace_of(settings, states=states, page=page)
        scheduler.set_layouts([RankLayout(namespace, small, states or StateTables())])
        return closed_after(scheduler)

    return make


def step(scheduler, asked, num_tokens, tables=(TABLE,), named=(), preempted=(), beside=0):
    """The metadata of a step that computes tokens of a request.

    Before it, vLLM asks what it can load of a request that has no KV.

    tables: the request's block tables. named: the states that vLLM says it keeps: for each the
      number of its table, its block, and its tokens. preempted: requests that lose their blocks.
    beside: the tokens before one of a sequence that bypasses the pool, in the same step.
    """
    if not asked.num_computed_tokens:
        found(scheduler, asked)
    scheduled = {asked.request_id: num_tokens} if num_tokens else {}
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled | ({"beside": 1} if beside else {}),
        scheduled_new_reqs=[SimpleNamespace(req_id="beside", num_computed_tokens=beside)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[asked.request_id], num_computed_tokens=[asked.num_computed_tokens]
        ),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda request_id: [*tables],
            boundary_state_offloads={asked.request_id: [*named]} if named else {},
        ),
        preempted_req_ids=set(preempted),
    )
    metadata = idle_step(scheduler)
    scheduler.add_saves(metadata, output)
    asked.num_computed_tokens += num_tokens
    return metadata


def idle_step(scheduler):
    """The metadata of a step that computes nothing."""
    metadata = PDStoreConnectorMetadata()
    scheduler.add_loads(metadata)
    return metadata


def found(scheduler, asked, num_computed=0):
    """The answer to a lookup, once there is one."""

    def answer():
        num_tokens = scheduler.num_found(asked, num_computed)
        return None if num_tokens is None else [num_tokens]

    return eventually(answer)[0]
