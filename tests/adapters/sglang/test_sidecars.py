"""Models with more host pools than that of KV, by SGLang's own controller and host pools."""

from __future__ import annotations

import pytest

from tests.support import sglang_pools as pools
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel
from tests.support.engine_pools import store_url as store_url

HASHES = kit.page_hashes(5)
SAVED, LOADED = [3, 1, 7, 2, 9], [8, 4, 0, 5, 6]


@pytest.fixture
def serve_hybrid(model, tmp_path, closed_after):
    """Opens ranks: `serve_hybrid(pools, store=...)`; over a pool in files if not told otherwise."""

    def serve_hybrid(host_pools, checkpoint=model, **options) -> pools.HybridServer:
        options = {"store": f"file://{tmp_path}/pool", **options}
        return closed_after(pools.HybridServer(host_pools, checkpoint, **options))

    return serve_hybrid


def mamba():
    return {"kv": wheel.mha_pool(), "mamba": pools.mamba_pool()}


def test_a_state_beside_kv_reaches_another_server_through_every_store(serve_hybrid, store_url):
    p, d = (serve_hybrid(mamba(), store=store_url) for _ in range(2))
    hashes = kit.page_hashes(5, store_url)
    assert p.backup(hashes, SAVED, mamba={hashes[3]: 11}) == {"kv": 5, "mamba": 1}
    found = d.query(hashes, pools.asked("mamba", 1))
    assert d.cut(found) == 4  # no state of the whole prompt is stored
    assert d.transfer(found, LOADED[:4], mamba=[21]) == {"kv": 4, "mamba": 1}
    assert [d.page("kv", n) for n in LOADED[:4]] == [p.page("kv", n) for n in SAVED[:4]]
    assert d.page("mamba", 21) == p.page("mamba", 11)
