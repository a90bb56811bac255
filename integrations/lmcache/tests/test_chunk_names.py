"""ChunkNames: what LMCache's names lack is in pdstore's, and equal chunks have equal names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdstore.errors import ConfigError
from pdstore.format import block
from pdstore_lmcache.chunk_names import ChunkNames, payload_bytes, shape_of
from tests.support.kv import settings_of

SHAPE = shape_of([torch.Size((2, 3, 16, 32))], [torch.float16])


def chunk(**changes):
    fields = {"chunk_hash": b"h" * 32, "model_name": "m", "kv_rank": 1, "object_group_id": 0}
    return SimpleNamespace(**(fields | {"cache_salt": ""} | changes))


def names(kv_cache_dtype=None, **settings):
    return ChunkNames(settings_of(**({"weights": "w"} | settings)), kv_cache_dtype)


def test_a_shape_tells_the_payload():
    groups = [torch.Size((2, 3)), torch.Size((5,))]
    assert payload_bytes(shape_of(groups, [torch.bfloat16, torch.uint8])) == 17
    assert payload_bytes(()) == 0


def test_the_name_of_a_chunk_stays_what_it_is():
    """The stored format: a pool outlives the version that filled it."""
    name = names().name(chunk(cache_salt="user"), SHAPE)
    assert name.key == (
        "pds1:c0ab18a9e72b33bfb7236be9975b40ed:0:0:0bf969dc2d9d19daab1cf19e9e7d359a"
    )
    header = block.header_of(name.start(6144))
    assert name.key == f"pds1:{header.namespace.hex()}:0:0:{header.prefix_hash.hex()}"
    assert header.payload_bytes == 6144


@pytest.mark.parametrize(
    "other",
    [
        {"chunk_hash": b"i" * 32},
        {"model_name": "n"},
        {"kv_rank": 2},
        {"object_group_id": 1},
        {"cache_salt": "user"},
        {"chunk_hash": b"h" * 31, "cache_salt": "h"},
    ],
)
def test_every_field_of_lmcaches_name_counts(other):
    made = names()
    assert made.name(chunk(), SHAPE) == made.name(chunk(), SHAPE)
    assert made.name(chunk(), SHAPE).key != made.name(chunk(**other), SHAPE).key


def test_empty_weights_are_those_of_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSTORE_WEIGHTS", "")
    keys = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(content)
        keys |= {
            names(weights=unset).name(chunk(model_name=str(tmp_path)), SHAPE).key
            for unset in (None, "")
        }
    assert len(keys) == 2


def test_weights_that_are_not_here_must_be_named():
    with pytest.raises(ConfigError, match=r"org/away is not on this host.*PDSTORE_WEIGHTS"):
        names(weights=None).name(chunk(model_name="org/away"), SHAPE)


def test_bytes_must_be_named():
    bytes_ = shape_of([torch.Size((6,))], [torch.uint8])
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        names().name(chunk(), bytes_)
    kinds = [names(kind).name(chunk(), bytes_).key for kind in ("fp8_e4m3", "fp8_e5m2")]
    assert kinds[0] != kinds[1]
