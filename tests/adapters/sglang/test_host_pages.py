"""HostPages: which host pools are served, and which page a token is in."""

from __future__ import annotations

import pytest
import torch

from pdstore.errors import ConfigError, LayoutError
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel

# isort: split
from pdstore.adapters.sglang.host_pages import HostPages
from pdstore.adapters.sglang.server import ServedModel

SERVED = ServedModel("float16", "w", "", None)


def pages_of(pool, rank=0, size=1):
    return HostPages.of(pool, SERVED, rank, size)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_pages_are_views_of_the_host_pool(layout):
    pool = wheel.mha_pool(layout=layout)
    pages = pages_of(pool)
    assert {cache.shape[:3] for cache in pages.caches} == {(16, 64, 1)}
    stored = b"".join(bytes(cache[3].flatten().numpy()) for cache in pages.caches)
    assert stored == bytes(pool.get_data_page(3 * 64).view(torch.uint8).numpy())
    pages.caches[0].zero_()
    assert not pool.kv_buffer[0].any() or layout == "layer_first"


def test_a_page_is_two_copies_of_a_model_with_heads_and_one_with_latents():
    assert [len(pages_of(pool).caches) for pool in (wheel.mha_pool(), wheel.mla_pool())] == [2, 1]


def test_the_namespace_is_of_the_whole_model():
    layout = pages_of(wheel.mha_pool(), rank=1, size=4).model
    assert [(spec.num_kv_heads, spec.head_dim) for spec in layout.layers] == [(8, 8)] * 3
    assert layout.dtype == "float16"
    assert layout.block_bytes == 4 * 64 * 3 * 2 * 8 * 2 * 2


def test_what_is_copied_is_as_large_as_what_is_described():
    for pool in (wheel.mha_pool(), wheel.mla_pool()):
        pages = pages_of(pool)
        assert pages.copied.block_bytes == pages.model.block_bytes
        assert pages.copied.parts == pages.model.parts


def test_another_kind_of_host_pool_is_refused():
    class MambaPoolHost:
        layout = "page_first"

    with pytest.raises(ConfigError, match="MambaPoolHost"):
        pages_of(MambaPoolHost())


def test_a_layout_that_is_not_known_is_refused():
    pool = wheel.mla_pool()
    pool.layout = "page_first_kv_split"
    with pytest.raises(ConfigError, match="page_first_kv_split"):
        pages_of(pool)


def test_numbers_are_those_of_the_pages():
    assert pages_of(wheel.mha_pool()).numbers(kit.indices_of([3, 0, 9]), 3) == [3, 0, 9]


@pytest.mark.parametrize(
    ("indices", "count"),
    [(torch.arange(64), 2), (torch.arange(100), 2), (torch.arange(32, 96), 1)],
)
def test_tokens_that_are_no_whole_pages_are_refused(indices, count):
    with pytest.raises(LayoutError, match=f"not {count} pages of 64"):
        pages_of(wheel.mha_pool()).numbers(indices, count)
