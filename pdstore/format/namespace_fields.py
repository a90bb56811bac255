"""The document of a namespace: all that must be equal on P and D, field by field."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pdstore.format.namespace import FORMAT_VERSION, Json
from pdstore.settings import Settings

if TYPE_CHECKING:
    from pdstore.format.layout import Layout


def namespace_fields(layout: Layout, settings: Settings, weights: str) -> dict[str, Json]:
    """Returns the fields of an instance's namespace. The salt is in them as its digest.

    weights: the weights' revision (`pdstore.weights_revision`).
    """
    salt = settings.salt.get_secret_value() if settings.salt else None
    fields: dict[str, Json] = {
        "format": FORMAT_VERSION,
        "weights": weights,
        "dtype": layout.dtype,
        "quantization": layout.quantization,
        "layers": [[s.kind, s.num_kv_heads, s.head_dim, s.channels] for s in layout.layers],
        "windows": [spec.window for spec in layout.layers],
        "rope": layout.rope,
        "block_tokens": layout.block_tokens,
        "order": layout.order,
        "page": layout.page,
        "tables": [spec.table for spec in layout.layers],
        "shards": layout.grid_shards,
        "draft_layers": layout.draft_layers,
        "layer_ranges": layout.num_ranges,
        "hash": settings.hash,
        "salt": None if salt is None else hashlib.sha256(salt.encode()).hexdigest(),
    }
    if settings.seal_key_file is not None:  # without a seal nothing is added: old keys stay valid
        fields["seal"] = "aes-256-gcm"
    return fields
