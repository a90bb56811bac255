"""The walks of block ids from vLLM's hooks to the C interface, over two processes' messages.

`pytest -s` prints them. A test fails only if the numbers do not reach the walk's end.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pdstore import KVPool, Layout
from pdstore.adapters.vllm import PDStoreConnector
from pdstore.adapters.vllm.messages import RankLayout
from tests.adapters.vllm.standins import GROUP, BlockPool, vllm_request
from tests.support.kv import LAYERS, caches_of, eventually, settings_of
from tests.support.walk import Tracer

IDS = [61, 29, 53, 47, 37, 59, 31, 43]
PROMPT = list(range(1000, 1128))


class BlockState:
    """Stands for what vLLM tells a connector of its block tables in each step."""

    def __init__(self, tables: dict[str, tuple[list[int], ...]]) -> None:
        self.tables = tables

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.tables[request_id]


class Engine:
    """Both connectors of one instance, called as vLLM calls them."""

    def __init__(self, url: str, role: str) -> None:
        given = {"store": url, "role": role, "pd_transfer_via_storage": True, "layer_ranges": 1}
        settings = settings_of(**given)
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config=given | {"staging": "8MiB"},
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
            parallel_config=SimpleNamespace(
                world_size=1, data_parallel_size=1, pipeline_parallel_size=1
            ),
            max_concurrent_batches=1,
            cache_config=SimpleNamespace(),
            model_config=SimpleNamespace(max_model_len=512),
        )
        caches = SimpleNamespace(kv_cache_groups=[GROUP], num_blocks=64)
        layout = Layout.of(
            settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope=""
        )
        namespace = layout.namespace(settings, weights="w")
        self.scheduler = PDStoreConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.scheduler.bind_gpu_block_pool(BlockPool())
        self.scheduler.set_xfer_handshake_metadata({0: RankLayout(namespace, 16)})
        self.worker = PDStoreConnector(config, KVConnectorRole.WORKER, caches)
        self.worker.worker.use_pool(KVPool(settings, layout, caches_of(layout), namespace))

    def step(self, tracer: Tracer, request, num_tokens: int) -> None:
        """Computes tokens of a request; the metadata crosses to the worker's process."""
        metadata = self.scheduler.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens={request.request_id: num_tokens} if num_tokens else {},
                kv_connector_block_state=BlockState(
                    {request.request_id: (list(IDS),)} if num_tokens else {}
                ),
            )
        )
        received = pickle.loads(pickle.dumps(metadata))
        tracer.copied(metadata, received)
        self.worker.bind_connector_metadata(received)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        request.num_computed_tokens += num_tokens

    def idle_step(self) -> None:
        """Has the next step's metadata made now, where it is traced."""
        output = SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=BlockState({}))
        self.scheduler.build_connector_meta(output)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def open_traced(tmp_path, closed_after):
    return lambda role: closed_after(Engine(f"shm://p?size=8MiB&dir={tmp_path}", role))


def save(engine, tracer):
    """Lets an instance save the prompt; returns what its answer says."""
    request = vllm_request(PROMPT, kv_transfer_params={"do_remote_decode": True})
    engine.scheduler.on_new_request(request)
    eventually(lambda: engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == 0)
    engine.step(tracer, request, len(PROMPT))
    params = engine.scheduler.request_finished(request, IDS)[1]
    engine.worker.worker.pool.flush(20)
    return params


def load(engine, tracer, params):
    request = vllm_request(PROMPT, kv_transfer_params=params)
    engine.scheduler.on_new_request(request)

    def found():
        return engine.scheduler.get_num_new_matched_tokens(request, 0)[0]

    num_found = eventually(found)
    blocks = SimpleNamespace(get_block_ids=lambda: (list(IDS),))
    engine.scheduler.update_state_after_alloc(request, blocks, num_found)
    engine.step(tracer, request, 0)
    eventually(lambda: engine.worker.get_finished(set())[1])


def test_the_walk_of_a_saves_block_ids(open_traced):
    tracer = Tracer(IDS)
    with tracer.hooked():
        p = open_traced("prefill")
        with tracer.tracing():
            p.idle_step()
            save(p, tracer)
    print(tracer.walk_to("pds_arena_fill"))


def test_the_walk_of_a_loads_block_ids(open_traced):
    params = save(open_traced("prefill"), Tracer(IDS))
    tracer = Tracer(IDS)
    with tracer.hooked():
        d = open_traced("decode")
        with tracer.tracing():
            d.idle_step()
            load(d, tracer, params)
    print(tracer.walk_to("pds_arena_take"))
