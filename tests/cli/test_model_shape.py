"""ModelShape: KV and parameters of published configurations."""

from __future__ import annotations

import json

import pytest

from pdstore.cli.model_shape import ModelShape
from pdstore.errors import ConfigError
from tests.cli.published import MODELS


@pytest.mark.parametrize(
    ("name", "kib", "billions"),
    [
        ("Llama-3.1-8B", 128, 7.5),
        ("Llama-3.1-70B", 320, 69.5),
        ("Qwen3-32B", 256, 32.0),
        ("DeepSeek-V3", 68.625, 36.6),
    ],
)
def test_kv_and_parameters(name, kib, billions, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    shape = ModelShape.of(str(tmp_path))
    assert shape.kv_bytes() == kib * 1024
    assert shape.kv_bytes(1) == kib * 512
    assert shape.active_params == pytest.approx(billions * 1e9, rel=0.01)


def test_a_mixture_counts_the_experts_that_a_token_passes(tmp_path):
    config = {
        **{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 0},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention, experts, router = 4 * 8 * 8, 2 * 3 * 8 * 16, 4 * 8
    assert ModelShape.of(str(tmp_path)).active_params == attention + experts + router


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no JSON"),
        ("{}", "it has no 'num_hidden_layers'"),
        ("[]", "no decoder's config"),
        ('{"num_hidden_layers": 2}', "it has no 'hidden_size'"),
    ],
)
def test_what_is_no_configuration_is_refused(text, why, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"other\.json .*{why}"):
        ModelShape.of(str(path))
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file"):
        ModelShape.of(str(tmp_path / "none"))
