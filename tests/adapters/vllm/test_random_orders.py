"""vLLM's own scheduler drives the connector at random, and makes no call that a phase forbids."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from pdstore import open_store
from pdstore.adapters.vllm import PDStoreConnector, plugin
from pdstore.adapters.vllm.messages import RankLayout
from pdstore.adapters.vllm.scheduler import PDStoreConnectorScheduler
from pdstore.adapters.vllm.tables import StateTables
from pdstore.errors import Reason
from tests.adapters.vllm.random_steps import BLOCK, NUM_BLOCKS, NUM_DRAFTS, SHARED, Chance, drain
from tests.support.kv import Instance, settings_of
from tests.support.states import StateInstance

NUM_TURNS, MOST_WALKS = 250, 12


@pytest.fixture(scope="module")
def config(checkpoints):
    """vLLM's configuration of an instance with so few blocks that it preempts requests."""
    plugin.register()
    init_none_hash(sha256)
    transfer = KVTransferConfig(
        kv_connector=plugin.NAME,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"pd_transfer_via_storage": True, "staging": "8MiB"},
    )
    return EngineArgs(
        model=str(checkpoints("llama")),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=256,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,  # so that a preempted request loads again
        kv_transfer_config=transfer,
    ).create_engine_config()


@pytest.fixture
def chance_of(config, tmp_path, closed_after):
    url = f"file://{tmp_path}/pool"
    store = closed_after(open_store(url, settings_of(store=url)))
    instance = closed_after(Instance(store))
    keys = instance.cache.keys(SHARED)
    assert instance.pool.save(keys, range(len(SHARED) // BLOCK)).wait(20).reason is None
    with_states = closed_after(StateInstance(store, block=BLOCK))
    with_states.put(SHARED, 32, 64)

    def make(seed, *, overlaps, mode=None, drafts=None):
        chance = Chance(config, url, seed, overlaps=overlaps, mode=mode, drafts=drafts)
        connector = chance.scheduler.connector
        layout = RankLayout(instance.namespace, BLOCK)
        if mode is not None:
            size = BLOCK if mode == "align" else 256
            scratch = NUM_DRAFTS if drafts else 0
            states = StateTables(frozenset({0, 1}), size, mode == "align", scratch)
            layout = RankLayout(with_states.namespace, BLOCK, states)
        connector.set_xfer_handshake_metadata({0: layout})
        closed_after(connector.scheduler)
        return chance

    return make


@pytest.fixture
def faults(monkeypatch):
    """What the connector has done wrong, or has taken for wrong."""
    noted = []
    note = noted.append
    monkeypatch.setattr(PDStoreConnectorScheduler, "bypass", lambda side, error: note(error))
    monkeypatch.setattr(PDStoreConnector, "count_fault", lambda side, hook: note(sys.exc_info()[1]))
    return noted


def walk(chance_of, faults, names, **kind):
    """Walks in three orders of a kind, and in more if they have not shown what is named.

    Which calls a seed brings also depends on when the pool's threads end. At the end of a walk no
    block is held.
    """
    seen: Counter[str] = Counter()
    for seed in range(MOST_WALKS):
        if seed >= 3 and all(seen[name] for name in names):
            break
        chance = chance_of(seed, **kind)
        for _ in range(NUM_TURNS):
            chance.turn()
        drain(chance)
        seen += chance.seen
        assert faults == []
        free = chance.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == NUM_BLOCKS - 1, "but for vLLM's null block"
    for name in names:
        assert seen[name], f"the walks have shown no {name}: {seen}"


@pytest.mark.parametrize("mode", [None, "align", "none"], ids=["no states", "align", "none"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["one-step", "two-steps"])
def test_vllm_calls_in_a_legal_order(chance_of, faults, overlaps, mode):
    names = ["preempted", "reset", "load", "short load", "left as WAITING", "left as RUNNING"]
    if mode is not None:
        names += ["load of states", "save of states"]
    if mode != "none":
        names += ["save of an answer"]
    walk(chance_of, faults, names, overlaps=overlaps, mode=mode)


@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_scratch_entries_of_drafts_are_never_saved_nor_held(chance_of, faults, method, mode):
    """vLLM moves those entries, and raises if one that it moves is not its own.

    A saved block has the state that its save names, and keeps it until the save has read it.
    """
    names = ["preempted", "reset", "load of states", "save of states", "short load"]
    names += ["left as WAITING", "left as RUNNING", "accepted draft", "rejected draft"]
    names += [] if mode == "none" else ["save of an answer"]
    walk(chance_of, faults, names, overlaps=False, mode=mode, drafts=method)


@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize(
    ("num_tokens", "reason", "num_computed"),
    [(65, None, 1), (64, None, 32), (65, Reason.LOST, 65)],
    ids=["up to a state", "without a state at its end", "a load that fails"],
)
def test_vllm_computes_what_no_state_has_come_for(
    chance_of, mode, num_tokens, reason, num_computed
):
    """The pool has states after 32 and 64 tokens, and at least one token must be computed."""
    chance = chance_of(0, overlaps=False, mode=mode)
    chance.let_jobs_end_at_once(reason)
    asked = chance.request_of(SHARED[:num_tokens], SamplingParams(max_tokens=1))
    chance.scheduler.add_request(asked)
    computed = 0
    while chance.scheduler.requests or chance.scheduler.connector.has_pending_push_work():
        computed += chance.turn(is_last=True).get(asked.request_id, 0)
    assert (computed, chance.seen["load of states"]) == (num_computed, 1)
