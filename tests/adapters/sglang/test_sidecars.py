"""Models with more host pools than that of KV, by SGLang's own controller and host pools."""

from __future__ import annotations

import hashlib
import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdstore.errors import ConfigError, Reason
from pdstore.format.keys import Namespace, Part, PromptKeys
from pdstore.metrics import Metrics
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import put
from tests.support import sglang_pools as pools
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel
from tests.support.engine_pools import files_of
from tests.support.kv import eventually, settings_of

# isort: split
from pdstore.adapters.sglang.host_pools import ServedModel, pages_of
from pdstore.adapters.sglang.sidecars import Sidecar, SidecarLookup, restorable

HASHES = kit.page_hashes(5)
SAVED, LOADED = [3, 1, 7, 2, 9], [8, 4, 0, 5, 6]
STATE, WINDOW = pools.asked("mamba", 1), 2


@pytest.fixture(params=["memory", "file", "shm"])
def any_store(request, tmp_path):
    return {
        "memory": f"memory://{tmp_path.name}",
        "file": f"file://{tmp_path}/pool",
        "shm": f"shm://p?size=8MiB&dir={tmp_path}",
    }[request.param]


@pytest.fixture
def serve_hybrid(model, tmp_path, closed_after):
    """Opens ranks: `serve_hybrid(pools, store=...)`; over a pool in files if not told otherwise."""

    def serve_hybrid(host_pools, checkpoint=model, **options) -> pools.HybridServer:
        options = {"store": f"file://{tmp_path}/pool", **options}
        return closed_after(pools.HybridServer(host_pools, checkpoint, **options))

    return serve_hybrid


def mamba(**shape):
    return {"kv": wheel.mha_pool(), "mamba": pools.mamba_pool(**shape)}


def windows():
    """A window's host pool has pages of its own, of other heads and layers than those of KV."""
    return {"kv": wheel.mha_pool(), "swa": wheel.mha_pool(heads=1)}


def sparse(layout="page_first"):
    latents = wheel.mla_pool(layout=layout)
    return {"kv": latents, "indexer": pools.indexer_pool(latents)}


def count_of(server, name: str, **labels: str) -> float | None:
    return server.backend.metrics.registry.get_sample_value(f"pdstore_{name}_total", labels)


def assert_pages_came(p, d, pool, saved, loaded):
    assert [d.page(pool, n) for n in loaded] == [p.page(pool, n) for n in saved]


def test_a_state_beside_kv_reaches_another_server(serve_hybrid, any_store):
    p, d = (serve_hybrid(mamba(), store=any_store) for _ in range(2))
    assert p.backup(HASHES, SAVED, mamba={HASHES[3]: 11}) == {"kv": 5, "mamba": 1}
    found = d.query(HASHES, pools.asked("mamba", 1))
    assert d.cut(found) == 4  # no state of the whole prompt is stored
    assert d.transfer(found, LOADED[:4], mamba=[21]) == {"kv": 4, "mamba": 1}
    assert_pages_came(p, d, "kv", SAVED[:4], LOADED[:4])
    assert_pages_came(p, d, "mamba", [11], [21])
    eventually(lambda: count_of(d, "misses", reason=Reason.ABSENT.value) == 1)
    eventually(lambda: count_of(d, "tokens", verb="loaded") == 4 * 64)


def test_windows_are_loaded_by_their_last_pages(serve_hybrid, any_store):
    p, d = (serve_hybrid(windows(), store=any_store) for _ in range(2))
    stored = {HASHES[0]: 15, HASHES[2]: 12, HASHES[3]: 10, HASHES[4]: 14}
    assert p.backup(HASHES, SAVED, swa=stored) == {"kv": 5, "swa": 4}
    short = d.query(HASHES[:3], pools.asked("swa", WINDOW))
    assert d.cut(short) == 1  # a window of two pages lacks the second
    found = d.query(HASHES, pools.asked("swa", WINDOW))
    assert d.cut(found) == 5
    assert d.transfer(found, LOADED, swa=[1, 13]) == {"kv": 5, "swa": 2}
    assert_pages_came(p, d, "kv", SAVED, LOADED)
    assert_pages_came(p, d, "swa", [10, 14], [1, 13])


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_an_indexer_is_loaded_with_the_latents_whose_pages_it_has(serve_hybrid, any_store, layout):
    config = {"tp_size": 2, "is_mla_model": True}
    p, d = (
        serve_hybrid(sparse(layout), store=any_store, config={**config, "tp_rank": rank})
        for rank in range(2)
    )
    assert p.backup(HASHES, SAVED) == {"kv": 5, "indexer": 5}
    found = d.query(HASHES, pools.asked("indexer"))
    assert len(found.hash_value) == 5
    assert d.transfer(found, LOADED)["kv"] == 5
    for pool in ("kv", "indexer"):
        assert_pages_came(p, d, pool, SAVED, LOADED)


def test_states_are_split_among_ranks_although_latents_are_whole(serve_hybrid):
    def rank(number):
        host_pools = {"kv": wheel.mla_pool(), "mamba": pools.mamba_pool()}
        config = {"tp_rank": number, "tp_size": 2, "is_mla_model": True}
        return serve_hybrid(host_pools, config=config)

    p, d = ([rank(number) for number in range(2)] for _ in range(2))
    for each in p:  # of the others than the first, SGLang stores only the states
        each.backup(HASHES, SAVED, mamba={HASHES[4]: 3})
    for number in range(2):
        found = d[number].query(HASHES, pools.asked("mamba", 1))
        assert d[number].cut(found) == 5
        assert d[number].transfer(found, LOADED, mamba=[6]) == {"kv": 5, "mamba": 1}
        assert_pages_came(p[number], d[number], "mamba", [3], [6])
        assert_pages_came(p[0], d[number], "kv", SAVED, LOADED)
    assert p[0].page("mamba", 3) != p[1].page("mamba", 3)


def test_ranks_take_a_length_that_all_of_them_can_restore(serve_hybrid):
    """Control: the least of the lengths that each can restore is one of which a rank lacks all."""
    ranks = [serve_hybrid(mamba(), config={"tp_rank": number, "tp_size": 2}) for number in range(2)]
    for rank, ends in zip(ranks, [(1, 3), (1, 2)], strict=True):
        rank.backup(HASHES, SAVED, mamba={HASHES[end]: end for end in ends})
    found = [rank.query(HASHES, pools.asked("mamba", 1)) for rank in ranks]
    least = min(len(each.hash_value) for each in found)
    assert pools.agree(ranks, found) == 2
    for rank, each in zip(ranks, found, strict=True):
        assert rank.transfer(each, LOADED[:2], mamba=[9]) == {"kv": 2, "mamba": 1}
    assert least == 3
    again = ranks[0].query(HASHES[:least], pools.asked("mamba", 1))
    again.hash_value = HASHES[:least]
    assert ranks[0].transfer(again, LOADED[:least], mamba=[9]) == {"kv": 3, "mamba": 0}


@pytest.fixture(scope="module")
def two_backends(tmp_path_factory):
    """Ours and SGLang's own backend for files, which is told of the same pages."""
    directory = tmp_path_factory.mktemp("two")
    host_pools = {**sparse(), "mamba": pools.mamba_pool(), "swa": wheel.mha_pool()}
    model = kit.checkpoint(directory / "model")
    ours = pools.HybridServer(host_pools, model, store=f"memory://{directory.name}")
    theirs = pools.hicache_storage.HiCacheFile(kit.storage_config({}), str(directory / "files"))
    yield ours, theirs
    ours.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_pages=st.integers(1, 7),
    stored=st.fixed_dictionaries(
        {name: st.sets(st.integers(0, 6)) for name in ("kv", "mamba", "swa", "indexer")}
    ),
    gaps_of_kv=st.booleans(),
    asked=st.permutations([("mamba", 1), ("swa", 2), ("indexer", None)]),
    num_asked=st.integers(1, 3),
    data=st.data(),
)
def test_what_can_be_restored_is_what_sglangs_own_backend_says(
    two_backends, num_pages, stored, gaps_of_kv, asked, num_asked, data
):
    ours, theirs = two_backends
    prompt = str(data.draw(st.uuids(), label="prompt"))
    hashes = kit.page_hashes(num_pages, prompt)
    if not gaps_of_kv:  # else nearly nothing is found
        stored["kv"] = range(7)
    for name, numbers in stored.items():
        names = [hashes[n] for n in sorted(numbers) if n < num_pages]
        for each in names:
            theirs.set(each if name == "kv" else f"{each}.{name}", torch.zeros(1))
        save(ours, name, names)
    last = data.draw(st.integers(1, 4), label="pages of a window")
    transfers = [
        pools.asked(name, last if number == 2 else number) for name, number in asked[:num_asked]
    ]
    expected = theirs.batch_exists_v2(hashes, transfers)
    assert ours.backend.batch_exists_v2(hashes, transfers) == expected


def save(server, name, names):
    if not names:
        return
    indices = pools.indices_of(server.pools[name], range(len(names)))
    transfer = pools.PoolTransfer(pools.PoolName(name), host_indices=indices, keys=names)
    answers = server.backend.batch_set_v2([transfer])
    assert answers == {name: [True] * len(names)}


def value_of(directory, group, page):
    """Returns a file with a page's value: of a KV group, and by SGLang's hash of the page."""
    for file in files_of(directory):
        _, namespace, number, _, name = file.name.split(":")
        digest = hashlib.sha256(bytes.fromhex(namespace) + page.encode()).hexdigest()
        if int(number) == group and digest.startswith(name):
            return file
    raise FileNotFoundError(f"no value of {page}")


@pytest.mark.parametrize("group", [0, 1])
def test_a_lost_page_of_an_indexer_or_of_kv_shortens_what_is_loaded(serve_hybrid, tmp_path, group):
    p, d = serve_hybrid(sparse()), serve_hybrid(sparse())
    p.backup(HASHES, SAVED)
    found = d.query(HASHES, pools.asked("indexer"))
    assert len(found.hash_value) == 5
    value_of(tmp_path / "pool", group, HASHES[3]).unlink()
    assert d.transfer(found, LOADED)["kv"] == 3
    assert_pages_came(p, d, "indexer", SAVED[:3], LOADED[:3])
    assert len(d.query(HASHES, pools.asked("indexer")).hash_value) == 3


def test_a_damaged_state_is_a_miss_and_is_not_found_again(serve_hybrid, tmp_path):
    p, d = serve_hybrid(mamba()), serve_hybrid(mamba())
    p.backup(HASHES, SAVED, mamba={HASHES[1]: 1, HASHES[4]: 4})
    found = d.query(HASHES, pools.asked("mamba", 1))
    value = value_of(tmp_path / "pool", 1, HASHES[4])
    damaged = bytearray(value.read_bytes())
    damaged[-1] ^= 1
    value.write_bytes(damaged)
    assert d.transfer(found, LOADED, mamba=[9]) == {"kv": 5, "mamba": 0}
    eventually(lambda: count_of(d, "misses", reason=Reason.CORRUPT.value) == 1)
    assert d.cut(d.query(HASHES, pools.asked("mamba", 1))) == 2


def test_d_waits_until_p_has_stored_the_states_of_a_prompt(serve_hybrid, any_store):
    p = serve_hybrid(mamba(), store=any_store, role="prefill")
    d = serve_hybrid(mamba(), store=any_store, role="decode", handoff_wait_s=60)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(d.query, HASHES, pools.asked("mamba", 1))
        p.backup(HASHES[:2], SAVED[:2], mamba={HASHES[1]: 1})
        p.backup(HASHES[2:], SAVED[2:], mamba={HASHES[4]: 4})
        found = asking.result(60)
    assert d.cut(found) == 5
    assert d.transfer(found, LOADED, mamba=[9]) == {"kv": 5, "mamba": 1}
    assert_pages_came(p, d, "mamba", [4], [9])


def test_d_loads_an_indexer_while_p_stores_it(serve_hybrid):
    p = serve_hybrid(sparse(), role="prefill")
    d = serve_hybrid(sparse(), role="decode", handoff_wait_s=60)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(d.query, HASHES, pools.asked("indexer"))
        eventually(lambda: (count_of(d, "store_calls", verb="match", outcome="ok") or 0) >= 3)
        p.backup(HASHES[:1], SAVED[:1])
        found = asking.result(60)
        assert len(found.hash_value) == 5  # and one is stored
        asked = count_of(d, "store_calls", verb="match", outcome="ok")
        loading = threads.submit(d.transfer, found, LOADED)
        eventually(lambda: count_of(d, "store_calls", verb="match", outcome="ok") > asked)
        p.backup(HASHES[1:], SAVED[1:])
        assert loading.result(60)["kv"] == 5
    for pool in ("kv", "indexer"):
        assert_pages_came(p, d, pool, SAVED, LOADED)


@pytest.mark.parametrize(
    ("name", "pool", "why"),
    [
        ("draft_indexer", wheel.mha_pool, r"MHATokenToKVPoolHost \(draft_indexer\)"),
        ("auxiliary_swa", wheel.mha_pool, "the pool auxiliary_swa, .* second sliding window"),
        ("deepseek_v4_c4", wheel.mha_pool, "the pool deepseek_v4_c4, .* DeepSeek V4"),
        ("indexer", wheel.mha_pool, r"MHATokenToKVPoolHost \(indexer\)"),
        ("swa", lambda: wheel.mha_pool(dtype=torch.bfloat16), "only windows of KV's type"),
    ],
)
def test_a_pool_that_is_not_known_is_refused_by_name(serve_hybrid, name, pool, why):
    with pytest.raises(ConfigError, match=why):
        serve_hybrid({"kv": wheel.mha_pool(), name: pool()})


def test_an_indexer_on_an_amd_gpu_is_refused(serve_hybrid, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match="indexer of sparse attention on AMD GPUs"):
        serve_hybrid(sparse())


def test_a_pool_that_shares_its_memory_or_comes_late_is_refused(serve_hybrid):
    shared = pools.mamba_pool()
    shared.shared_allocation_domain = object()
    with pytest.raises(ConfigError, match="mamba shares its memory"):
        serve_hybrid({"kv": wheel.mha_pool(), "mamba": shared})
    entry = types.SimpleNamespace(host_pool=pools.mamba_pool(), name=pools.PoolName.MAMBA)
    backend = serve_hybrid({"kv": wheel.mha_pool()}).backend
    with pytest.raises(ConfigError, match="mamba came after"):
        backend.register_mem_host_pool_v2(entry.host_pool, entry.name)


def test_states_of_another_form_are_of_another_namespace(serve_hybrid, tmp_path):
    p = serve_hybrid(mamba())
    p.backup(HASHES, SAVED, mamba={HASHES[4]: 1})
    others = [
        serve_hybrid(mamba(dtype=torch.bfloat16)),
        serve_hybrid(mamba(rows=5)),
        serve_hybrid(mamba(), arguments={"mamba_backend": "flashinfer"}),
        serve_hybrid(mamba(), kit.checkpoint(tmp_path / "other", b"other weights")),
        serve_hybrid({"kv": wheel.mha_pool()}),
    ]
    assert serve_hybrid(mamba()).backend.batch_exists_v2(HASHES, [STATE]).kv_hit_pages == 5
    assert [other.backend.batch_exists(HASHES) for other in others] == [0] * len(others)


@pytest.mark.parametrize(
    ("make", "pinned"),
    [
        (mamba, "7fd08b47c98e63a2f66d4584bd50950d"),
        (windows, "9da46033bbe6353e50d3c4ba017aa15b"),
        (sparse, "a7c5d62aebf6251539703021169be5ba"),
    ],
)
def test_the_namespace_of_host_pools_is_what_it_always_was(make, pinned):
    """Another digest is another namespace: what an older version has stored would not be found."""
    served = ServedModel("float16", "w", "", None, "[]")
    ranks = [pages_of(make(), served, rank, 2) for rank in range(2)]
    namespaces = [
        pages.layout.namespace(settings_of(), weights="w")
        for each in ranks
        for pages in each.values()
    ]
    assert {each.hex for each in namespaces} == {pinned}
    assert not any(each.needs or each.states for each in namespaces)


def test_kv_alone_has_the_same_pages_by_both_of_sglangs_controllers(serve_hybrid, serve):
    serve(wheel.mha_pool()).backup(HASHES, SAVED)
    assert serve_hybrid({"kv": wheel.mha_pool()}).backend.batch_exists(HASHES) == 5


def test_a_server_that_is_switched_off_finds_and_stores_nothing(serve_hybrid):
    off = serve_hybrid(mamba(), pd_transfer_via_storage=False)
    assert off.backup(HASHES, SAVED, mamba={HASHES[4]: 1}) == {"kv": 5, "mamba": 1}
    assert off.backend.batch_exists_v2(HASHES, [STATE]).restorable_prefix_pages == []
    found = off.query(HASHES, pools.asked("mamba", 1))
    found.hash_value = HASHES
    assert off.transfer(found, LOADED, mamba=[1]) == {"kv": 0}


def test_what_raises_is_a_miss_and_ends_no_thread(serve_hybrid):
    server = serve_hybrid(mamba())
    groups = pools.PoolTransfer(
        pools.PoolName.MAMBA, keys=HASHES, hit_policy=pools.PoolHitPolicy.BLOCK_GROUPS
    )
    unknown = pools.PoolTransfer(pools.PoolName.SWA, keys=HASHES, host_indices=torch.arange(5))
    assert server.backend.batch_exists_v2(HASHES, [groups]).kv_hit_pages == 0
    assert server.backend.batch_get_v2([unknown]) == {"swa": [False] * 5}
    assert server.backend.batch_set_v2([unknown]) == {"swa": [False] * 5}
    eventually(lambda: count_of(server, "misses", reason=Reason.FAULT.value) == 3)


def test_nothing_is_restorable_if_the_store_is_down(serve_hybrid):
    server = serve_hybrid(mamba(), store="redis://127.0.0.1:1/0")
    assert server.backend.batch_exists_v2(HASHES, [STATE]).kv_hit_pages == 0


NAMESPACE = Namespace({"n": 1}, (Part(1, 0), Part(2, 0)), block_tokens=64)
KEYS = PromptKeys(NAMESPACE).extend(range(12 * 64))


class WithoutSearch(WrapperStore):
    """Can only match leading keys; a search finds pages that are then lost."""

    def __init__(self, store, finds=None) -> None:
        super().__init__(store)
        self.finds = finds

    def which_stored(self, keys):
        return [True] * len(keys)

    def optional(self, protocol):
        return self.finds and self if protocol is FindsKeys else super().optional(protocol)


@pytest.mark.parametrize(
    ("finds", "lengths"), [(None, [7, 9]), (True, [1, 2, 3, 4, 5, 6, 7, 8, 9])]
)
def test_lengths_of_a_store_that_cannot_search_or_that_loses_pages(finds, lengths):
    """A state has two parts; of the last lengths, only those that the store leases are told."""
    store = WithoutSearch(MemoryStore(), finds)
    for number in (0, 6, 8):
        names = KEYS.store_keys(NAMESPACE.parts, number, number + 1)
        put(store, names, [b"state"] * len(names))
    put(store, KEYS.store_keys(NAMESPACE.parts[:1], 10, 11), [b"half of a state"])
    found = restorable(store, 12, [Sidecar("mamba", KEYS, 1)])
    assert found.lengths == lengths
    assert json.dumps(found.by_pool) == ("{}" if finds is None else '{"mamba": 12}')


class Hanging(WrapperStore):
    """A store whose searches hang until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.goes_on = threading.Event()

    def which_stored(self, keys):
        self.goes_on.wait(60)
        return self.wrapped.which_stored(keys)

    def optional(self, protocol):
        return self if protocol is FindsKeys else super().optional(protocol)


def test_a_search_that_hangs_holds_up_nobody_and_its_late_answer_is_not_used(closed_after):
    store, metrics = Hanging(), Metrics()
    put(store, names := KEYS.store_keys(NAMESPACE.parts), [b"state"] * len(names))
    lookup = closed_after(SidecarLookup(store, metrics, timeout_s=0.05))
    states = [Sidecar("mamba", KEYS, 1)]
    first = lookup.find(KEYS, states)
    assert first.lengths == []

    def num_slow():
        lookup.find(KEYS, states)
        labels = {"reason": Reason.STORE_SLOW.value}
        return metrics.registry.get_sample_value("pdstore_misses_total", labels)

    eventually(lambda: num_slow() >= 1)
    store.goes_on.set()
    eventually(lambda: lookup.find(KEYS, states).lengths == [*range(1, 13)])
    assert first.lengths == []
