"""Prompts with their block tables, for tests of values."""

from __future__ import annotations

from pdstore import LayerSpec, Layout, PromptKeys
from pdstore.worker.values import PromptBlocks
from tests.support.kv import settings_of

FULL = LayerSpec(2, 8)
SLIDING = LayerSpec(2, 8, kind="sliding", window=40, table=1)


def prompt_of(num_tokens=200, layers=(FULL,) * 4, tables=None, **changes):
    """Returns a prompt of three full blocks and a tail; `changes`: settings."""
    settings = settings_of(**changes)
    layout = Layout.of(settings, dtype="float32", layers=layers, engine_block_tokens=16, rope="")
    keys = PromptKeys(layout.namespace(settings, weights="w")).extend(range(num_tokens))
    return PromptBlocks(layout, keys, tables or [range(100, 120)] * layout.num_tables)
