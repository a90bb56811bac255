"""shaping: what a model's configuration does to its KV beyond the weights, as one text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdstore.format.namespace import Json

SHAPING = (
    *("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"),
    *("partial_rotary_factor", "sliding_window", "use_sliding_window", "layer_types"),
    *("attention_chunk_size", "attn_logit_softcapping", "attention_multiplier"),
    *("query_pre_attn_scalar", "rms_norm_eps", "num_experts_per_tok"),
)
"""Fields of a model's configuration that change its KV and are not part of its weights."""


def shaping(fields: Mapping[str, Any], *, max_model_len: int | None, **others: Json) -> str:
    """Returns the text for `Layout.rope`: equal texts mean that equal tokens have equal KV.

    fields: those of SHAPING, None for one that the model does not have.
    max_model_len: tokens of the longest prompt; it counts for LongRoPE alone.
    others: more that changes the KV of the engine.
    """
    rope = fields["rope_parameters"] or fields["rope_scaling"] or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        others["max_model_len"] = max_model_len  # selects the factors that K is rotated by
    return canonical({**fields, **others})


def canonical(value: Json) -> str:
    """Returns a value as JSON with sorted keys; equal values give equal texts."""
    return json.dumps(value, sort_keys=True, default=str)
