"""The model as SGLang's arguments tell it, and refusals where they leave it open."""

from __future__ import annotations

import pytest
import torch

from pdstore.errors import ConfigError
from tests.support import sglang_server as kit
from tests.support.kv import settings_of as settings

# isort: split
from pdstore.adapters.sglang import pages as server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def served(model, stored_as=torch.bfloat16, *, weights=None, **arguments):
    args = kit.server_args(model, **arguments)
    return server.served_model(settings(weights=weights), args, stored_as)


def test_weights_and_dtype_are_the_servers_unless_the_user_names_a_revision(model):
    found = served(model)
    assert (found.dtype, found.quantization) == ("bfloat16", None)
    assert found.weights.startswith("sha256:")
    assert served(model, weights="mine@1", load_format="dummy").weights == "mine@1"


def test_a_model_of_the_hub_is_named_by_its_commit(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--m" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    kit.checkpoint(snapshot)
    refs = tmp_path / "models--org--m" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert served("org/m").weights == f"commit:{COMMIT}"


def test_a_model_that_is_nowhere_or_cannot_be_read_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="--model-path DIRECTORY"):
        served(tmp_path / "missing")
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="configuration"):
        served(model)


def test_bytes_are_the_kind_of_fp8_that_the_server_was_told(model):
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        dtype = getattr(torch, served(model, torch.uint8, kv_cache_dtype=kind).dtype)
        assert str(dtype).startswith(f"torch.float8_{kind[-4:]}")
    for kind in ("auto", "nvfp4", "mxfp8"):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype is {kind}"):
            served(model, torch.uint8, kv_cache_dtype=kind)


def test_overrides_and_nested_configurations_count(tmp_path, model):
    plain = served(model).rope
    assert served(model, json_model_override_args='{"rope_theta": 5}').rope != plain
    assert served(model, json_model_override_args='{"index_topk": 512}').rope != plain
    nested = kit.checkpoint(tmp_path / "vision", text_config={"rope_theta": 1e4})
    assert served(nested).rope == plain


def test_settings_are_told_from_what_sglang_reads():
    extra = {**kit.DYNAMIC, "prefetch_threshold": 64, "hicache_storage_pass_prefix_keys": True}
    assert server.settings_of({**extra, "role": "decode"}).role == "decode"
