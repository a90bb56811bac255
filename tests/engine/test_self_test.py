"""self_test: passes where a block comes back, names the step where it does not, leaves nothing."""

from __future__ import annotations

import pytest
import torch

from pdstore import LayerSpec, Layout, open_store
from pdstore.engine.self_test import self_test
from pdstore.errors import StoreError
from pdstore.settings import read_settings
from pdstore.store.optional import ListsValues
from tests.support.kv import LAYERS


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
        {"layers": [LayerSpec(1, 24, value_dim=0, kind="mla")] * 2},
        {"page": "packed"},
    ],
    ids=["plain", "heads first, read-only", "latent", "pages"],
)
def test_a_block_of_the_layout_comes_back_and_nothing_is_left(url, shape):
    tried(url, **shape)
    store = open_store(url, read_settings())
    assert isinstance(store, ListsValues)
    assert [value.key for value in store.stored_values() if ":pool" not in value.key] == []
    store.close()


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
