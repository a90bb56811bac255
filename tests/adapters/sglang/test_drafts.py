"""Host pools of a draft model, by SGLang's own controller: they are loaded if they are there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdstore.errors import ConfigError, Reason
from tests.support import sglang_pools as pools
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel
from tests.support.engine_pools import files_of
from tests.support.kv import eventually

HASHES = kit.page_hashes(5)
SAVED, LOADED = [3, 1, 7, 2, 9], [8, 4, 0, 5, 6]
WINDOW = {HASHES[3]: 10, HASHES[4]: 14}


@pytest.fixture
def serve(model, tmp_path, closed_after, request):
    """Opens ranks: `serve(pools, draft=...)`, over a pool in files if not told otherwise.

    draft: the weights of the draft model; None for a server that does not speculate.
    """

    def serve(make=None, *, draft: bytes | None = b"a draft", **options) -> pools.HybridServer:
        arguments = dict(options.pop("arguments", {}))
        host_pools = {} if draft is None else (make or full)()
        if draft is not None:
            directory = kit.checkpoint(tmp_path / draft.decode(), draft)
            arguments = {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(directory),
                **arguments,
            }
        options = {"store": f"file://{tmp_path}/pool", "arguments": arguments, **options}
        host_pools = {"kv": wheel.mha_pool(), **host_pools}
        return closed_after(pools.HybridServer(host_pools, model, **options))

    return serve


@pytest.fixture(params=["memory", "file", "shm"])
def any_store(request, tmp_path):
    return {
        "memory": f"memory://{tmp_path.name}",
        "file": f"file://{tmp_path}/pool",
        "shm": f"shm://p?size=8MiB&dir={tmp_path}",
    }[request.param]


def full():
    """A draft with full attention has other heads and another type than the model."""
    return {"draft": wheel.mha_pool(heads=1, dtype=torch.bfloat16)}


def sparse():
    """A draft with sparse attention beside a model with it."""
    latents, own = wheel.mla_pool(), wheel.mla_pool()
    return {
        **{"kv": latents, "indexer": pools.indexer_pool(latents), "draft": own},
        "draft_indexer": pools.indexer_pool(own, layers=1),
    }


def windows():
    """A model with sliding windows, and a draft whose windows have the same numbers."""
    return {"swa": wheel.mha_pool(heads=1), "draft_swa": wheel.mha_pool(heads=1)}


def load(d, *more, **sidecars):
    """Asks for the prompt and loads it; returns how many pages of each pool SGLang counts."""
    found = d.query(HASHES, *more, *d.derived(2))
    return d.transfer(found, LOADED[: d.cut(found)], **sidecars)


def came(p, d, pool, saved=SAVED, loaded=LOADED):
    """Returns how many leading pages of D are P's; raises if a later one has any byte but 0."""
    pairs = list(zip(saved, loaded, strict=True))
    count = 0
    while count < len(pairs) and p.page(pool, pairs[count][0]) == d.page(pool, pairs[count][1]):
        count += 1
    assert not any(byte for _, at in pairs[count:] for byte in d.page(pool, at))
    return count


def values_of_draft(directory):
    """Returns the files with a draft's values, which have its name behind their KV group's."""
    return sorted(file for file in files_of(directory) if "." in file.name.split(":")[2])


def test_a_draft_reaches_a_server_with_the_same_draft(serve, any_store):
    p, d = serve(store=any_store), serve(store=any_store)
    assert p.backup(HASHES, SAVED) == {"kv": 5, "draft": 5}
    assert load(d)["kv"] == 5
    assert came(p, d, "kv") == came(p, d, "draft") == 5


def test_a_draft_with_an_indexer_reaches_a_server_with_the_same_draft(serve, any_store):
    p, d = serve(sparse, store=any_store), serve(sparse, store=any_store)
    stored = p.backup(HASHES, SAVED)
    assert stored == dict.fromkeys(["kv", "indexer", "draft", "draft_indexer"], 5)
    assert load(d)["kv"] == 5
    assert [came(p, d, pool) for pool in d.pools] == [5] * 4


def test_a_draft_with_windows_is_loaded_by_their_last_pages(serve, any_store):
    p, d = serve(windows, store=any_store), serve(windows, store=any_store)
    assert p.backup(HASHES, SAVED, swa=WINDOW) == {"kv": 5, "swa": 2, "draft_swa": 2}
    assert load(d, pools.asked("swa", 2), swa=[1, 13]) == {"kv": 5, "swa": 2, "draft_swa": 2}
    assert came(p, d, "swa", [10, 14], [1, 13]) == came(p, d, "draft_swa", [10, 14], [1, 13]) == 2


def test_a_server_that_does_not_speculate_loads_the_models_own_pages(serve, any_store):
    p, d = serve(store=any_store), serve(draft=None, store=any_store)
    assert p.backup(HASHES, SAVED) == {"kv": 5, "draft": 5}
    assert d.transfer(d.query(HASHES), LOADED)["kv"] == 5
    assert came(p, d, "kv") == 5


@pytest.mark.parametrize("at_p", [None, b"another draft"])
def test_a_server_with_another_draft_loads_the_models_own_pages_and_is_cold(serve, any_store, at_p):
    p, d = serve(draft=at_p, store=any_store), serve(store=any_store)
    p.backup(HASHES, SAVED)
    assert load(d)["kv"] == 5
    assert came(p, d, "kv") == 5
    cold = bytes(len(d.page("draft", LOADED[0])))
    assert [d.page("draft", number) for number in LOADED] == [cold] * 5


def test_sglangs_own_backend_loads_no_page_without_its_draft(tmp_path):
    """So it is the backend that answers for a draft: SGLang believes what it is told."""
    theirs = pools.hicache_storage.HiCacheFile(kit.storage_config({}), str(tmp_path / "files"))
    for page in HASHES:
        theirs.set(page, torch.zeros(1))
    assert theirs.batch_exists_v2(HASHES, [pools.asked("draft")]).kv_hit_pages == 0
    assert theirs.batch_exists(HASHES) == 5


def test_a_window_of_another_draft_does_not_discard_the_prompt(serve):
    p, d = serve(windows, draft=b"another draft"), serve(windows)
    p.backup(HASHES, SAVED, swa=WINDOW)
    assert load(d, pools.asked("swa", 2), swa=[1, 13]) == {"kv": 5, "swa": 2, "draft_swa": 2}
    assert came(p, d, "swa", [10, 14], [1, 13]) == 2
    assert came(p, d, "draft_swa", [10, 14], [1, 13]) == 0


def damage(value):
    data = bytearray(value.read_bytes())
    data[-1] ^= 1
    value.write_bytes(data)


@pytest.mark.parametrize(("harm", "reason"), [("unlink", "absent"), (damage, "corrupt")])
def test_a_page_that_is_missing_or_wrong_is_a_miss_of_the_draft_alone(
    serve, tmp_path, harm, reason
):
    p, d = serve(), serve()
    for end in range(1, 6):
        p.backup(HASHES[end - 1 : end], SAVED[end - 1 : end])
        if end == 3:
            before = values_of_draft(tmp_path / "pool")
        if end == 4:
            [value] = {*values_of_draft(tmp_path / "pool")} - {*before}
    if callable(harm):
        harm(value)
    else:
        value.unlink()
    assert load(d)["kv"] == 5
    assert came(p, d, "kv") == 5
    assert came(p, d, "draft") == 3
    count = d.backend.metrics.registry.get_sample_value
    eventually(lambda: count("pdstore_misses_total", {"reason": reason}) == 1)
    assert count("pdstore_tokens_total", {"verb": "cold"}) == 2 * kit.PAGE
    assert not value.exists()
    assert load(serve())["kv"] == 5


def test_a_draft_that_comes_late_has_the_same_keys(serve):
    p, d, plain = serve(), serve(lambda: {}), serve(draft=None)
    plain.backup(HASHES, SAVED)
    d.add("draft", full()["draft"])
    d.backup(HASHES, SAVED)
    assert load(p)["kv"] == 5
    assert (came(plain, p, "kv"), came(d, p, "draft")) == (5, 5)


def test_a_page_that_was_loaded_cold_is_not_stored(serve, tmp_path):
    """Otherwise servers that computed the draft would never store theirs: its key is taken.

    SGLang is told that it is stored: what it takes for missing it may write again.
    """
    p, d = serve(), serve()
    serve(draft=None).backup(HASHES, SAVED)
    found = d.query(HASHES, pools.asked("draft"))
    assert found.query_pool_hit_pages == {"kv": 5, "draft": 5}
    assert load(d)["kv"] == 5
    assert d.backup(HASHES, LOADED) == {"kv": 5, "draft": 5}
    assert values_of_draft(tmp_path / "pool") == []
    p.backup(HASHES, SAVED)
    assert len(values_of_draft(tmp_path / "pool")) == 5
    assert load(d)["kv"] == 5
    assert came(p, d, "draft") == 5


def test_d_loads_a_draft_while_p_stores_it(serve):
    p, d = serve(role="prefill"), serve(role="decode", handoff_wait_s=60)

    def num_looks():
        labels = {"verb": "match", "outcome": "ok"}
        count = d.backend.metrics.registry.get_sample_value
        return count("pdstore_store_calls_total", labels) or 0

    with ThreadPoolExecutor() as threads:
        asking = threads.submit(d.query, HASHES, pools.asked("draft"))
        eventually(lambda: num_looks() >= 3)
        p.backup(HASHES[:1], SAVED[:1])
        found = asking.result(60)
        assert len(found.hash_value) == 5  # and one is stored
        before = num_looks()
        loading = threads.submit(d.transfer, found, LOADED)
        eventually(lambda: num_looks() > before)
        p.backup(HASHES[1:], SAVED[1:])
        assert loading.result(60)["kv"] == 5
    assert came(p, d, "kv") == came(p, d, "draft") == 5


def test_ranks_agree_although_sglang_stores_a_draft_of_only_one(serve):
    """Beside latents SGLang lets the first rank alone store, but a draft with heads is split."""

    def ranks():
        config = {"tp_size": 2, "is_mla_model": True}
        return [
            serve(lambda: {"kv": wheel.mla_pool(), **full()}, config={**config, "tp_rank": rank})
            for rank in range(2)
        ]

    p, d = ranks(), ranks()
    p[0].backup(HASHES, SAVED)
    found = [rank.query(HASHES, pools.asked("draft")) for rank in d]
    assert pools.agree(d, found) == 5
    for number, rank in enumerate(d):
        assert rank.transfer(found[number], LOADED)["kv"] == 5
        assert came(p[0], rank, "kv") == 5
        assert came(p[0], rank, "draft") == (5, 0)[number]


def test_a_draft_that_cannot_be_asked_for_does_not_shorten_the_prompt(serve):
    d = serve()
    no_pages = pools.PoolTransfer(pools.PoolName.DRAFT, torch.arange(3), keys=HASHES)
    assert d.backend.batch_get_v2([no_pages]) == {"draft": [True] * 5}
    count = d.backend.metrics.registry.get_sample_value
    eventually(lambda: count("pdstore_misses_total", {"reason": Reason.FAULT.value}) == 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"speculative_algorithm": "EAGLE"},
        {"speculative_draft_model_quantization": "fp8"},
        {"speculative_draft_kv_cache_dtype": "fp8_e5m2"},
        {"speculative_draft_model_path": None},
    ],
)
def test_what_decides_a_drafts_kv_names_it(serve, changed):
    p, d = serve(), serve(arguments=changed)
    p.backup(HASHES, SAVED)
    assert load(d)["kv"] == 5
    assert (came(p, d, "kv"), came(p, d, "draft")) == (5, 0)


def test_a_draft_of_the_models_own_checkpoint_is_named_by_it(serve):
    arguments = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": None}
    p, d = serve(arguments=arguments), serve(arguments=arguments)
    p.backup(HASHES, SAVED)
    assert load(d)["kv"] == 5
    assert came(p, d, "draft") == 5


def test_a_draft_whose_weights_are_not_known_is_refused(serve):
    with pytest.raises(ConfigError, match=r"the draft model owner/none .* DIRECTORY"):
        serve(arguments={"speculative_draft_model_path": "owner/none"})


def test_other_pools_of_a_draft_are_refused_by_name(serve):
    with pytest.raises(ConfigError, match=r"the pool draft_state, .* does not know"):
        serve().backend.register_mem_host_pool_v2(pools.mamba_pool(), "draft_state")
