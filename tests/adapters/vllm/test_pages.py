"""Indexers of sparse attention (DeepSeek V3.2, GLM-5), as vLLM's own classes describe them.

A page has the rows of all its tokens, 128 bytes each, and then their scales, four bytes each. vLLM
computes such models on GPUs only; here its classes plan the caches, and the bytes lie on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from array import array
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.model_executor.models import deepseek_v2
from vllm.utils import deep_gemm
from vllm.v1.kv_cache_interface import (
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdstore import JobResult, KVPool, LayerSpec, PrefixCacheManager
from pdstore.adapters.vllm.contents import PLAIN
from pdstore.adapters.vllm.describe import keys_of, layout_of, refuse_unsupported
from pdstore.adapters.vllm.layers import views_of
from pdstore.adapters.vllm.messages import LoadSpec, PDStoreConnectorMetadata, SaveSpec
from pdstore.adapters.vllm.worker import OpenSaves, PDStoreConnectorWorker
from pdstore.errors import ConfigError, LayoutError, Reason
from pdstore.format.block import HEADER_BYTES
from pdstore.format.handoff import HandoffId
from pdstore.format.plan import LoadPlan, SavePlan
from pdstore.testing.values import get
from tests.adapters.vllm.standins import vllm_config, vllm_request
from tests.support.instances import store as store
from tests.support.kv import eventually, settings_of
from tests.support.vllm_replay import load_without_pages
from tests.worker.test_mover import flip, plant

PLANNING = importlib.util.find_spec("vllm.v1.core.kv_cache_planning")  # from vLLM 0.33 on
PLANNED_BY = importlib.import_module(f"vllm.v1.core.kv_cache_{'planning' if PLANNING else 'utils'}")

TOKENS, ROW, SCALE = 64, 128, 4
NUM_BLOCKS = 24
POISON = 0xEE
INDEXERS = [f"model.layers.{n}.self_attn.indexer.k_cache" for n in range(2)]
LATENTS = [f"model.layers.{n}.self_attn.attn" for n in range(2)]
NAMES = [name for both in zip(INDEXERS, LATENTS, strict=True) for name in both]
BF16 = partial(MLAAttentionSpec, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
FP8 = partial(
    MLAAttentionSpec,
    num_kv_heads=1,
    head_size=576,
    dtype=torch.uint8,
    cache_dtype_str="fp8_ds_mla",
    state_content_bytes=656,
    kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
)


class Caches:
    """The KV caches of one instance, as vLLM plans them for a model with two layers.

    block_tokens, kernel_tokens: of vLLM's blocks, and of those that its kernels see: pages.
    indexer: changes what vLLM says of the indexers' caches.
    """

    def __init__(
        self, monkeypatch, latent=FP8, layout="LBHNC", block_tokens=64, kernel_tokens=64, **indexer
    ):
        self.modules = {}
        self.config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context=self.modules),
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                cache_dtype="auto",
                block_size=block_tokens,
                num_gpu_blocks_override=NUM_BLOCKS,
                prefix_cache_retention_interval=None,
                get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            ),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(num_hidden_layers=2),
                max_model_len=512,
                quantization=None,
            ),
        )
        monkeypatch.setattr(deepseek_v2, "get_current_vllm_config", lambda: self.config)
        for name in INDEXERS:
            deepseek_v2.DeepseekV32IndexerCache(
                ROW + SCALE, torch.uint8, name, self.config.cache_config
            )
        of_indexer = self.modules[INDEXERS[0]].get_kv_cache_spec(self.config)
        of_indexer = replace(of_indexer, **indexer)
        specs = {
            name: of_indexer if name in INDEXERS else latent(block_size=block_tokens)
            for name in NAMES
        }
        group = KVCacheGroupSpec(NAMES, UniformTypeKVCacheSpecs.from_specs(specs))
        plan = PLANNED_BY.get_kv_cache_config_from_groups
        self.kv_cache_config = plan(self.config, [group], 1 << 30)
        self.tensors = {}
        tensors, order = self.kv_cache_config.kv_cache_tensors, KVCacheLayout[layout]
        raw = torch.full((tensors[0].size,), POISON, dtype=torch.uint8).view(torch.int8)
        for planned in tensors:
            spec = specs[planned.layers[0]]
            views = create_kv_cache_views(raw, spec, NUM_BLOCKS, order, planned, kernel_tokens)
            self.tensors |= zip(planned.layers, views, strict=True)

    def on_gpu(self, **settings):
        """Returns the layout of these caches on a GPU, where vLLM does not pack pages of MLA."""
        there = {name: tensor.to("meta") for name, tensor in self.tensors.items()}
        return layout_of(settings_of(**settings), self.config, self.kv_cache_config, there)[0]

    def views(self):
        views = views_of(self.kv_cache_config, self.tensors)
        return [views[name] for name in NAMES]

    def page(self, name, row):
        """Returns the rows and the scales of a page, from where vLLM's kernels have them."""
        page = self.tensors[name][row].flatten()
        return page[: TOKENS * ROW].view(-1, ROW), page[TOKENS * ROW :].view(-1, SCALE)

    def of_tokens(self, name, table, num_tokens):
        """Returns the row and the scale of each token in an indexer; of other layers, the KV."""
        if name not in INDEXERS:
            rows = self.tensors[name][table].transpose(1, 2).flatten(0, 1)
            return (rows[:num_tokens],)
        pages = [self.page(name, row) for row in table]
        return tuple(torch.cat(each)[:num_tokens] for each in zip(*pages, strict=True))


@pytest.fixture
def caches(monkeypatch):
    one = SimpleNamespace(world_size=1)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: one)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    return partial(Caches, monkeypatch)


class Half:
    """A pool over these caches, and the cache of keys."""

    def __init__(self, store, caches, layout=None):
        self.caches, settings = caches, settings_of()
        self.layout = layout or caches.on_gpu()
        self.namespace = self.layout.namespace(settings, weights="w")
        self.cache = PrefixCacheManager(settings, self.namespace, store=store)
        self.pool = KVPool(settings, self.layout, caches.views(), self.namespace, store=store)

    def close(self):
        self.pool.close()
        self.cache.close()


@pytest.fixture
def half(store, closed_after):
    def half(caches, layout=None):
        return closed_after(Half(store, caches, layout))

    return half


P_ROWS, D_ROWS = [7, 20, 3, 11, 15], [12, 5, 19, 8, 2]


def compute(p, num_tokens, table=P_ROWS):
    """Writes P's KV of so many tokens, all else being poison."""
    for name in NAMES:
        for row, first in zip(table, range(0, num_tokens, TOKENS), strict=False):
            count = min(TOKENS, num_tokens - first)
            if name in INDEXERS:
                for part in p.page(name, row):
                    part[:count].random_(0, 256)
            else:
                tokens = p.tensors[name][row][0, :count]
                tokens.view(torch.uint8).random_(0, 256)


def hand_over(p, d, num_tokens):
    keys = p.cache.keys(range(num_tokens))
    handoff, params = p.cache.announce(keys)
    assert p.pool.save(keys, P_ROWS, handoff=handoff).wait(10) == JobResult(num_tokens)
    found = d.cache.lookup(d.cache.keys(range(num_tokens)), params).wait(10)
    return d.pool.load(found.keys, D_ROWS).wait(10)


def same_bytes(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def assert_handed_over(p, d, num_tokens):
    """D has each row and each scale of P's tokens at its own blocks, and poison in all others."""
    for name in NAMES:
        wanted = p.of_tokens(name, P_ROWS, num_tokens)
        for got, want in zip(d.of_tokens(name, D_ROWS, num_tokens), wanted, strict=True):
            assert same_bytes(got, want)
        used = D_ROWS[: -(-num_tokens // TOKENS)]
        others = [row for row in range(len(d.tensors[name])) if row not in used]
        assert (d.tensors[name][others].contiguous().view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("latent", [BF16, FP8], ids=["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 100, 300])
def test_d_gets_each_row_and_each_scale_at_its_own_blocks(caches, half, num_tokens, latent):
    p, d = caches(latent), caches(latent)
    compute(p, num_tokens)
    assert hand_over(half(p), half(d), num_tokens) == JobResult(num_tokens)
    assert_handed_over(p, d, num_tokens)
    for name in INDEXERS:  # a tail carries its page
        used = -(-num_tokens // TOKENS)
        assert torch.equal(d.tensors[name][D_ROWS[:used]], p.tensors[name][P_ROWS[:used]])


def test_pages_that_are_taken_for_mla_lose_the_scales_of_a_tail(caches, half):
    """The control: the test above can fail."""
    p, d = caches(), caches()
    compute(p, 100)
    layout = p.on_gpu()
    taken = [LayerSpec.latent(132) if spec.is_page else spec for spec in layout.identity.layers]
    layout = replace(layout, identity=replace(layout.identity, layers=tuple(taken)))
    assert hand_over(half(p, layout), half(d, layout), 100) == JobResult(100), "D counts them all"
    (rows, scales), (wanted_rows, wanted) = (
        each.of_tokens(INDEXERS[0], table, 100) for each, table in ((d, D_ROWS), (p, P_ROWS))
    )
    assert torch.equal(rows, wanted_rows)
    assert (scales == wanted).all(1).sum() == 64, "of 36 tokens they are lost"


def test_a_control_loads_pages_to_where_vllm_does_not_read_them(caches, monkeypatch):
    """The benchmark compares D with it."""
    registered = {}
    monkeypatch.setattr(
        PDStoreConnectorWorker, "register", lambda worker, tensors: registered.update(tensors)
    )
    load_without_pages()
    tensors = caches(layout="BLHNC").tensors
    PDStoreConnectorWorker.register(None, tensors)
    moved = [name for name in NAMES if registered[name].data_ptr() != tensors[name].data_ptr()]
    assert moved == INDEXERS
    assert all(torch.equal(registered[name], tensors[name]) for name in NAMES)


def refusal_of_vllm(layout, block_tokens):
    """Returns how vLLM itself refuses such a model in a layout; None if it does not."""
    if not layout.is_block_compact:
        return "cannot express this model's mixed page sizes"
    return "Reduce --block-size to 64" if layout.is_block_outermost and block_tokens > 64 else None


@pytest.mark.parametrize("layout", [each.name for each in KVCacheLayout])
@pytest.mark.parametrize("block_tokens", [64, 128])
def test_pages_lie_whole_in_each_layout_that_vllm_has_for_them(caches, half, layout, block_tokens):
    """In blocks of 128 tokens, each page of 64 is a row of its own."""
    if refusal := refusal_of_vllm(KVCacheLayout[layout], block_tokens):
        with pytest.raises(ValueError, match=refusal):
            caches(layout=layout, block_tokens=block_tokens)
        return
    p, d = caches(layout=layout, block_tokens=block_tokens), caches()
    rows = NUM_BLOCKS * block_tokens // TOKENS
    assert {tuple(view.shape[:3]) for view in p.views()} == {(rows, TOKENS, 1)}
    compute(p, 300)
    assert hand_over(half(p), half(d), 300) == JobResult(300)
    assert_handed_over(p, d, 300)


@pytest.mark.parametrize("num_held", [0, 64, 128])
def test_vllms_block_ids_lead_to_pages_behind_those_that_d_has(caches, half, num_held):
    """P's blocks have 128 tokens, D's 64: the connector's workers turn their ids into rows."""
    p, d = caches(block_tokens=128), caches()
    at_p, at_d = half(p), half(d)
    p_ids, d_ids = [9, 4, 6], [12, 5, 19, 8, 2]
    p_rows = [2 * number + n for number in p_ids for n in range(2)]
    compute(p, 300, p_rows)
    workers = []
    for each, rows_per_block in ((at_p, 2), (at_d, 1)):
        config = each.caches.kv_cache_config
        workers.append(
            PDStoreConnectorWorker(settings_of(), vllm_config(), config, each.pool.metrics)
        )
        workers[-1].use_pool(each.pool, rows_per_block)
    keys = at_p.cache.keys(range(300))
    save = SaveSpec(7, "r", SavePlan(keys, handoff=HandoffId.new()), [array("q", p_ids)])
    workers[0].start_saves(PDStoreConnectorMetadata(saves=[save]))
    workers[0].open_saves.end_step()
    eventually(lambda: at_p.cache.match(keys).num_tokens == 300)
    load = LoadSpec("r", LoadPlan(keys, num_held, 300), [array("q", d_ids)])
    workers[1].start_loads(PDStoreConnectorMetadata(loads=[load]))
    workers[1].begin_loads()
    ended = eventually(lambda: [each for each in [workers[1].end_loads()] if each[0]])
    assert ended == [({"r"}, set())]
    for name in NAMES:
        wanted = p.of_tokens(name, p_rows, 300)
        for got, want in zip(d.of_tokens(name, d_ids, 300), wanted, strict=True):
            assert same_bytes(got[num_held:], want[num_held:])
            assert (got[:num_held].contiguous().view(torch.uint8) == POISON).all()


@pytest.mark.parametrize(("latent", "dtype"), [(BF16, "bfloat16"), (FP8, "uint8")])
def test_what_is_common_to_all_layers_is_taken_from_one_of_tokens(caches, latent, dtype):
    """The first tensor that vLLM registers is an indexer's."""
    made = caches(latent)
    assert next(iter(made.tensors)) in INDEXERS
    layout = made.on_gpu()
    assert layout.identity.dtype == dtype
    assert layout.geometry.tables == (TOKENS,)
    assert [spec.is_page for spec in layout.identity.layers] == [True, False] * 2
    assert all(spec.is_whole for spec in layout.identity.layers), "on each rank"
    assert not layout.identity.drafts, "an indexer is a part of its layer"


def test_a_page_counts_as_computed_when_its_layers_attention_is_reported(caches):
    """vLLM reports no indexers. Ranges end with the layers all the same."""
    identity = replace(caches().on_gpu().identity, num_ranges=2)
    layout = replace(caches().on_gpu(), identity=identity)
    counts: list[int] = []
    saves = OpenSaves(layout, NAMES)
    saves.add(SimpleNamespace(layers_done=lambda n, **_: counts.append(n)))
    for name in LATENTS:
        saves.layer_done(name)
    assert counts == [2, 4]


def test_a_salted_request_has_no_keys(caches, half):
    """Its last page may hold rows of an earlier request behind the prompt's end."""
    cache = half(caches()).cache
    assert keys_of(vllm_request([1, 2]), cache, PLAIN) is not None
    assert keys_of(vllm_request([1, 2], cache_salt="mine"), cache, PLAIN) is None


def test_tenants_are_not_kept_apart_by_a_salt_in_one_pool(caches):
    made = caches()
    there = {name: tensor.to("meta") for name, tensor in made.tensors.items()}
    with pytest.raises(LayoutError, match=r"PDSTORE_SALT.*pages are stored whole"):
        layout_of(settings_of(salt="mine" * 4), made.config, made.kv_cache_config, there)


@pytest.mark.misconfiguration(
    "the pages of an indexer have another length or other scales at D than at P"
)
def test_pages_of_another_length_or_with_other_scales_are_told_by_name(caches, monkeypatch):
    settings = settings_of(block_tokens=128)

    def namespace_of(**changes):
        layout = caches(**changes).on_gpu(block_tokens=128)
        return layout.namespace(settings, weights="w")

    ours = namespace_of()
    assert namespace_of(block_tokens=128).digest == ours.digest, "a page is a block of the kernels"
    longer = namespace_of(block_tokens=128, kernel_tokens=128)
    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: True, raising=False)
    of_blackwell = namespace_of()
    for theirs, fields in ((longer, ["form", "layers"]), (of_blackwell, ["form"])):
        told = ours.differences(theirs.described)
        assert [line.split()[0].rstrip(":") for line in told] == fields
        assert "pages of other types, shapes or order" in told[0]
        assert "kernels, block size and kind of GPU" in told[0]


@pytest.mark.parametrize("field", ["index_topk", "indexer_rope_interleave"])
def test_options_of_the_indexers_that_change_kv_are_told_by_name(caches, field):
    """The weights stay the same, and so do the layers."""
    ours, theirs = caches(), caches()
    setattr(theirs.config.model_config.hf_text_config, field, 512)
    settings = settings_of()
    namespaces = [each.on_gpu().namespace(settings, weights="w") for each in (ours, theirs)]
    [told] = namespaces[0].differences(namespaces[1].described)
    assert told.startswith("rope")


@pytest.mark.parametrize("num_tokens", [36, 64])
def test_one_wrong_bit_of_a_scale_is_a_miss_that_heals(caches, half, store, num_tokens):
    p, d = caches(), caches()
    compute(p, 64 + num_tokens)
    at_p, at_d = half(p), half(d)
    hand_over(at_p, at_d, 64 + num_tokens)
    of_pages = at_p.namespace.parts[0]
    name = at_p.cache.keys(range(64 + num_tokens)).store_keys([of_pages])[-1]
    size = HEADER_BYTES + at_p.layout.payload_bytes(of_pages, num_tokens)
    damaged = flip(get(store, [name], [size])[0], size - 1)
    plant(store, name, damaged)
    keys = at_d.cache.keys(range(64 + num_tokens))
    assert at_d.pool.load(keys, D_ROWS).wait(10) == JobResult(64, Reason.CORRUPT)
    assert hand_over(at_p, at_d, 64 + num_tokens) == JobResult(64 + num_tokens)
    assert_handed_over(p, d, 64 + num_tokens)


def shuffled(caches):
    class Shuffled(deepseek_v2.DeepseekV32IndexerCache):
        uses_shuffled_layout = True

    made = caches()
    for name in INDEXERS:
        made.modules[name].__class__ = Shuffled
    return made


def of_other_kernels(caches):
    made = caches()
    backend = SimpleNamespace(get_name=lambda: "MINIMAX_M3_SPARSE_INDEXER")
    for name in INDEXERS:
        made.modules[name] = SimpleNamespace(get_attn_backend=lambda: backend)
    return made


def without_a_role(caches):
    return caches(cache_role=type(BF16(block_size=64).cache_role).SPARSE)


def compressed(caches):
    return caches(tokens_per_state=4, block_tokens=256, kernel_tokens=256)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (shuffled, "shuffles the rows of its pages"),
        (of_other_kernels, "kernels MINIMAX_M3_SPARSE_INDEXER, .* those of DEEPSEEK_V32_INDEXER"),
        (without_a_role, r"describes it as MLA.*use vLLM 0\.30 or newer"),
        (compressed, "compressed attention .4 tokens in a row"),
    ],
)
def test_pages_of_other_indexers_are_refused_by_name(caches, make, why):
    wanted = f"layer {INDEXERS[0]} of KV group 0 .*{why}.*docs/models.md"
    with pytest.raises(LayoutError, match=wanted):
        make(caches).on_gpu()


def test_kv_that_lies_in_no_tensor_is_refused_by_name():
    hot = HiSparseHotSpec(block_size=64, page_size=4096, blocks_per_request=2)
    config = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer.0.hot"], hot)])
    given = SimpleNamespace(parallel_config=None, model_config=None, cache_config=None)
    why = r"layer layer\.0\.hot of KV group 0 .*turn off HiSparse.*docs/models\.md"
    with pytest.raises(ConfigError, match=why):
        refuse_unsupported(given, config)
