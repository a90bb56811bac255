"""Layer ranges that are saved while the model computes the next ones: which layers are reported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.models.deepseek_v32.attention import DeepseekV32Attention

from pdstore import LayerSpec, Layout
from pdstore.adapters.vllm.layers import report_computed
from pdstore.adapters.vllm.worker import OpenSaves
from tests.support.kv import settings_of
from tests.support.states import NO_WINDOW

FULL = LayerSpec(2, 8, table=1)
STATE = NO_WINDOW[0]


@pytest.mark.parametrize(
    ("layers", "done"),
    [
        ([STATE, FULL, STATE, FULL], {"b": [2], "d": [4]}),
        ([FULL, STATE, FULL, STATE], {"a": [], "c": [3]}),  # range 0 ends with a state
        ([STATE, STATE, FULL, STATE], {"c": [3]}),
    ],
)
def test_a_state_counts_as_computed_when_a_later_layer_is_reported(layers, done):
    layout = Layout.of(
        settings_of(layer_ranges=2),
        dtype="float32",
        layers=layers,
        engine_block_tokens=16,
        rope="",
        boundary_tokens=64,
    )
    counts: list[int] = []
    saves = OpenSaves(layout, ["a", "b", "c", "d"])
    saves.add(SimpleNamespace(layers_done=lambda n, **_: counts.append(n)))
    seen = {}
    for name in done:
        counts.clear()
        saves.layer_done(name)
        seen[name] = [*counts]
    assert seen == done
    counts.clear()
    saves.end_step()
    assert counts == [4]


@pytest.mark.parametrize(
    ("order", "done"),
    [("abcdef", {"b": 2, "d": 4, "f": 6}), ("bdface", {"a": 2, "c": 4, "e": 6})],
    ids=["the layout's", "by tables"],
)
def test_a_range_is_saved_when_all_layers_so_far_are_reported_in_any_order(order, done):
    layout = Layout.of(
        settings_of(layer_ranges=3),
        dtype="float32",
        layers=[FULL] * 6,
        engine_block_tokens=16,
        rope="",
    )
    counts: list[int] = []
    saves = OpenSaves(layout, list("abcdef"))
    for _ in range(2):  # steps
        saves.add(SimpleNamespace(layers_done=lambda n, **_: counts.append(n)))
        seen = {}
        for name in order:
            counts.clear()
            saves.layer_done(name)
            if counts:
                [seen[name]] = counts
        assert seen == done
        saves.end_step()


class OwnForward(MLAAttention):
    """Attends by itself, as DeepSeek V3.2's attention does: vLLM calls no hook of a connector."""

    def __init__(self):
        torch.nn.Module.__init__(self)

    def forward(self, hidden):
        return hidden + 1


class CommonForward(OwnForward):
    """Attends by the operation from which vLLM calls the hooks."""

    forward = MLAAttention.forward

    def register_forward_hook(self, *args, **kwargs):
        raise AssertionError("vLLM reports this layer")


def test_vllms_attention_of_these_models_has_a_forward_of_its_own():
    assert issubclass(DeepseekV32Attention, MLAAttention)
    assert DeepseekV32Attention.forward is not MLAAttention.forward


def test_a_layer_that_vllm_does_not_report_is_reported_when_its_forward_returns():
    modules = {"common": CommonForward(), "own": OwnForward(), "indexer": torch.nn.Identity()}
    context = SimpleNamespace(static_forward_context=modules)
    config, reported = SimpleNamespace(compilation_config=context), []
    report_computed(config, [*modules, "unknown"], reported.append)
    for module in (modules["own"], modules["indexer"]):
        module(torch.zeros(1))
    assert reported == ["own"]
