"""Sizing: published numbers come out of published configurations."""

from __future__ import annotations

import json

import pytest

from pdstore.errors import ConfigError
from pdstore.sizing import ModelShape, main
from pdstore.sizing.break_even import KNOWN_MODELS, Machine, break_even
from tests.docs.commands import ROOT
from tests.support.published_models import HYBRIDS, MODELS

TABLE = {  # KiB a token, GB a million; by length: GB, A800, H100, H20 in GB/s, seconds on an H100
    "Llama-3.1-8B": (128, 131, [(0.13, 1.34, 4.24, 0.63, 0.032), (1.07, 1.19, 3.78, 0.57, 0.284)]),
    "Llama-3.1-70B": (320, 328, [(0.34, 0.36, 1.15, 0.17, 0.291), (2.68, 0.34, 1.08, 0.16, 2.48)]),
    "Qwen3-32B": (256, 262, [(0.27, 0.63, 1.99, 0.30, 0.135), (2.15, 0.56, 1.78, 0.27, 1.20)]),
    "DeepSeek-V3": (68.6, 70, [(0.07, 0.14, 0.45, 0.07, 0.159), (0.58, 0.12, 0.37, 0.06, 1.57)]),
}
LONG = {
    "Llama-3.1-8B": [(4.29, 0.87, 2.75, 0.41, 1.56), (17.2, 0.41, 1.31, 0.20, 13.1)],
    "Llama-3.1-70B": [(10.7, 0.28, 0.89, 0.13, 12.1), (42.9, 0.16, 0.52, 0.08, 82)],
    "Qwen3-32B": [(8.59, 0.42, 1.32, 0.20, 6.5), (34.4, 0.20, 0.64, 0.10, 53)],
    "DeepSeek-V3": [(2.30, 0.07, 0.22, 0.03, 10.3), (9.21, 0.03, 0.09, 0.01, 106)],
}
STATES = {  # layers with KV and with states, MiB of states, KiB of KV a token, tokens of equal size
    "Qwen3-Next-80B": (12, 36, 37.7, 24, 1608),
    "Qwen3.5-4B": (8, 24, 49.1, 32, 1572),
    "Nemotron-H-8B": (4, 24, 97.4, 16, 6234),
    "Nemotron-3-Nano-30B": (6, 23, 46.8, 6, 7988),
    "Kimi-Linear-48B": (7, 20, 41.4, 7.875, 5384),
    "LFM2-1.2B": (6, 10, 0.0781, 12, 6),
    "Granite-4-H-Tiny": (4, 36, 27.7, 8, 3543),
}
"""As vLLM 0.32's own calculators of states say."""
PARAMS = {"DeepSeek-V3": ("--params", "37e9")}  # as its makers count


@pytest.fixture
def config(tmp_path):
    def write(name):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(MODELS[name]))
        return str(path)

    return write


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_break_evens_is_reproduced(name, config, capsys):
    kib, gb_million, short = TABLE[name]
    rows = {}
    for gpu in ("A800", "H100", "H20"):
        asked = [config(name), "--gpu", gpu, *PARAMS.get(name, ()), "--json"]
        assert main(asked) == 0
        document = json.loads(capsys.readouterr().out)
        rows[gpu] = document["break_even"]
    assert document["kv_bytes_per_token"] / 1024 == pytest.approx(kib, rel=0.001)
    assert document["million_tokens_bytes"] / 1e9 == pytest.approx(gb_million, rel=0.01)
    for i, (gb, a800, h100, h20, seconds) in enumerate([*short, *LONG[name]]):
        found = [rows[gpu][i]["bytes_per_s"] / 1e9 for gpu in rows]
        assert rows["H100"][i]["kv_bytes"] / 1e9 == pytest.approx(gb, rel=0.01, abs=0.006)
        assert found == pytest.approx([a800, h100, h20], rel=0.01, abs=0.006)
        assert rows["H100"][i]["compute_s"] == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("name", STATES)
def test_states_count_once_a_prompt(name, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HYBRIDS[name]))
    layers, state_layers, mib, kib, num_tokens = STATES[name]
    shape = ModelShape.of_config(str(path))
    assert (shape.layers, shape.state_layers) == (layers, state_layers)
    assert shape.state_bytes / 2**20 == pytest.approx(mib, rel=0.002)
    assert shape.kv_bytes() == kib * 1024
    assert main([str(path), "--prompt", "100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["break_even"][0]["kv_bytes"] == 100 * shape.kv_bytes() + shape.state_bytes
    assert main([str(path)]) == 0
    said = f"states of {state_layers} layers: {mib:.3g} MiB after each prefix that is kept"
    assert f"{said}, as much as {num_tokens:,} tokens of KV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kept", "of_state", "of_attention"),
    [  # the projections of one layer, as the tensors of its checkpoint are shaped
        ("Qwen3-Next-80B", "layer_types", 2048 * (12288 + 64 + 4096), 2048 * (4096 * 2 + 512 * 2)),
        ("Nemotron-H-8B", "hybrid_override_pattern", 4096 * (18560 + 8192), 4096 * 10240),
        ("LFM2-1.2B", "layer_types", 2048 * (6144 + 2048), 2048 * 5120),
        ("Granite-4-H-Tiny", "layer_types", 1536 * (6448 + 3072), 1536 * 4096),
        (
            "Kimi-Linear-48B",
            "linear_attn_config",
            2304 * (4 * 4096 + 32 + 2 * 128) + 4096 * 2 * 128,
            2304 * (6144 + 576 + 4096) + 512 * 8192,
        ),
    ],
)
def test_layers_with_states_compute_their_own_projections(
    name, kept, of_state, of_attention, tmp_path
):
    """The same model with attention in all of these layers has other parameters only there."""
    config = HYBRIDS[name]
    instead = {
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "hybrid_override_pattern": config.get("hybrid_override_pattern", "").replace("M", "*"),
        "linear_attn_config": None,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    shape = ModelShape.of_config(str(path))
    path.write_text(json.dumps(config | {kept: instead[kept]}))
    of_all = ModelShape.of_config(str(path))
    more = shape.state_layers * (of_state - of_attention)
    assert shape.active_params - of_all.active_params == more
    squares = shape.prefill_flops(2) - 2 * 2 * shape.active_params
    assert squares / shape.layers == (of_all.prefill_flops(2) - 4 * of_all.active_params) / (
        of_all.layers
    ), "they have no attention over the prompt"


def test_the_page_tells_the_states_of_models_that_people_serve():
    page = (ROOT / "docs" / "sizing.md").read_text()
    told = [line for line in page.splitlines() if line.startswith("|") and " MiB | " in line]
    assert len(told) == 5
    for name, (_, layers, mib, kib, num_tokens) in [*STATES.items()][: len(told)]:
        row = f"| {name} | {layers} | {mib} MiB | {kib:.3g} KiB | {num_tokens:,} tokens |"
        assert row in told


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": None, "full_attention_interval": 4},
        {"layer_types": None, "layers_block_type": HYBRIDS["Qwen3-Next-80B"]["layer_types"]},
    ],
)
def test_the_layers_of_states_are_told_in_several_ways(more, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS["Qwen3-Next-80B"] | more))
    shape = ModelShape.of_config(str(tmp_path))
    assert (shape.layers, shape.state_layers) == (12, 36)


def test_a_bandwidth_gets_a_verdict(config, capsys):
    path = config("Llama-3.1-8B")
    assert main([path, "--prompt", "8192", "--prompt", "131072", "--bandwidth", "2"]) == 0
    _, _, short, long, _ = capsys.readouterr().out.splitlines()
    assert short.split()[0] == "8,192"
    assert "compute (a read: 0.537 s)" in short
    assert "read, 8.59 s" in long


@pytest.mark.parametrize(
    ("name", "kib", "billions"), [("Llama-3.1-8B", 128, 7.5), ("DeepSeek-V3", 68.625, 36.6)]
)
def test_kv_and_parameters(name, kib, billions, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    shape = ModelShape.of_config(str(tmp_path))
    assert shape.kv_bytes() == kib * 1024
    assert shape.kv_bytes(1) == kib * 512
    assert shape.active_params == pytest.approx(billions * 1e9, rel=0.01)


def test_an_indexer_adds_to_kv_and_limits_what_attention_sees(tmp_path):
    shapes = []
    for name in ("DeepSeek-V3", "DeepSeek-V3.2"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(MODELS[name]))
        shapes.append(ModelShape.of_config(str(path)))
    dense, sparse = shapes
    assert sparse.kv_bytes() - dense.kv_bytes() == sparse.kv_bytes(1) - dense.kv_bytes(1)
    assert sparse.kv_bytes() - dense.kv_bytes() == 61 * (128 + 4)
    of_indexer = 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    assert sparse.active_params - dense.active_params == of_indexer

    def attention(shape, num_tokens):
        return shape.prefill_flops(num_tokens) - 2 * shape.active_params * num_tokens

    for n in (2048, 131_072):  # each token sees 2,048 at most; 2 operations an element
        pairs = sum(min(token, 2048) for token in range(n)) + n / 2
        by_heads = 61 * 128 * (192 + 128) * 2 * pairs
        assert attention(sparse, n) == pytest.approx(by_heads + 61 * 64 * 128 * n**2, rel=1e-3)
    assert attention(sparse, 131_072) < attention(dense, 131_072) / 3


@pytest.mark.parametrize(
    ("name", "billions", "of_embedding"),
    [("Nemotron-H-8B", 8.1, 0.54), ("Nemotron-3-Nano-30B", 3.6, 0.35)],
)
def test_nemotrons_mlps_have_two_matrices(name, billions, of_embedding, tmp_path):
    """Its makers count the parameters that compute a token, and the embedding."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS[name]))
    shape = ModelShape.of_config(str(tmp_path))
    assert shape.active_params / 1e9 + of_embedding == pytest.approx(billions, rel=0.01)


def test_nemotrons_mlps_and_experts_count_by_the_layers_that_are_some(tmp_path):
    """As transformers writes such a config: without the number of layers, and with both widths."""
    config = HYBRIDS["Nemotron-3-Nano-30B"] | {"moe_latent_size": 1024, "intermediate_size": 4096}
    del config["hybrid_override_pattern"], config["num_hidden_layers"]

    def active_params(*types):
        types = ["linear_attention", "full_attention", *types]
        (tmp_path / "config.json").write_text(json.dumps(config | {"layers_block_type": types}))
        return ModelShape.of_config(str(tmp_path)).active_params

    of_mlp = active_params("mlp", "mlp") - active_params("mlp")
    assert of_mlp == 2 * 2688 * 4096
    of_experts = 6 * 2 * 1024 * 1856 + 2 * 2688 * 3712
    assert active_params("mlp", "moe") - active_params("mlp") == (
        of_experts + 2 * 2688 * 1024 + 2688 * 128
    ), "six experts on the latent, the shared one, the ways to the latent and back, the router"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no JSON"),
        ("{}", "it has no 'num_hidden_layers'"),
        ("[]", "no decoder's config"),
        ('{"num_hidden_layers": 2}', "it has no 'hidden_size'"),
        (json.dumps(HYBRIDS["LFM2-1.2B"] | {"layer_types": ["conv"]}), "only layers with states"),
    ],
)
def test_what_is_no_configuration_is_refused(text, why, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"other\.json .*{why}"):
        ModelShape.of_config(str(path))
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file"):
        ModelShape.of_config(str(tmp_path / "none"))


@pytest.mark.parametrize("known", KNOWN_MODELS, ids=lambda shape: shape.name)
def test_known_models_are_those_of_published_configurations(known, tmp_path):
    file = tmp_path / known.name / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps((MODELS | HYBRIDS)[known.name]))
    assert known == ModelShape.of_config(str(file))


def verdicts(capsys, *options):
    """The verdicts of the table of tiers, by model."""
    assert main([*options, "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    return {row["model"]: list(row["verdicts"].values()) for row in models}


def test_a_tier_pays_where_loading_is_quicker_than_computing(capsys):
    on_h100 = verdicts(capsys)
    assert on_h100["Llama-3.1-8B"] == ["loses", "loses", "even", "pays", "pays"]
    assert on_h100["Qwen3-32B"] == ["loses", "even", "pays", "pays", "pays"]
    assert on_h100["DeepSeek-V3"] == ["pays"] * 5
    assert verdicts(capsys, "--gpu", "H20")["Llama-3.1-8B"] == ["pays"] * 5
    at_rest = break_even(KNOWN_MODELS[0], Machine("H100"), 8192)
    slower = f"{at_rest.num_tokens / at_rest.compute_s / 4}"
    assert verdicts(capsys, "--tokens-per-s", slower)["Llama-3.1-8B"] == ["even", *["pays"] * 4]
    assert verdicts(capsys, "--bandwidth", "3")["Llama-3.1-8B"] == ["loses"]


def test_a_measured_rate_of_a_prefill_is_what_a_model_is_judged_by(config, capsys):
    asked = [config("Llama-3.1-8B"), "--prompt", "8192", "--tokens-per-s", "16384"]
    assert main([*asked, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["break_even"]
    assert row["compute_s"] == 0.5
    assert row["bytes_per_s"] == 2 * row["kv_bytes"]
    assert main(asked) == 0
    assert "one prompt alone, 16,384 tokens/s;" in capsys.readouterr().out


def test_the_page_has_the_table_of_tiers_as_it_is_printed(capsys):
    assert main(["--gpu", "H100"]) == 0
    page = (ROOT / "docs" / "sizing.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_an_unknown_gpu_has_no_table(capsys):
    assert main(["--gpu", "H900"]) == 2
    assert "--gpu H900: known are" in capsys.readouterr().err
