"""ChunkNames: pdstore's keys and headers for the chunks that LMCache names."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from pdstore.errors import ConfigError
from pdstore.format import block
from pdstore.format.keys import (
    FORMAT_VERSION,
    HASH_BYTES,
    BlockKey,
    Json,
    Namespace,
    Part,
    PromptKeys,
    length_prefixed,
)
from pdstore.format.weights import find_checkpoint, weights_revision
from pdstore.settings import Settings

_PARTS = (Part(0, 0),)

ChunkShape: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The dtype and the shape of each tensor of a chunk."""


class ObjectKey(Protocol):
    """LMCache's name of a chunk, `lmcache.v1.distributed.api.ObjectKey`."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class ChunkName(NamedTuple):
    """A chunk's name in the store, and the prefix hash that its header must have."""

    key: BlockKey
    namespace: bytes
    chunk_hash: bytes

    def start(self, payload_bytes: int) -> bytes:
        """The first bytes of the stored value, `block.start_of` its header."""
        return block.start_of(
            block.Header(0, 0, 0, 1, 0, payload_bytes, self.namespace, self.chunk_hash)
        )


def shape_of(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> ChunkShape:
    """Returns the shape of a chunk from LMCache's description of it."""
    return tuple(
        (str(dtype).removeprefix("torch."), tuple(shape))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def payload_bytes(shape: ChunkShape) -> int:
    """Returns the bytes of a chunk's tensors."""
    return sum(getattr(torch, dtype).itemsize * math.prod(sizes) for dtype, sizes in shape)


class ChunkNames:
    """Names chunks in a namespace of their model's weights and of their shape.

    LMCache's own name has neither weights nor dtype nor shape. Any thread may call it.

    kv_cache_dtype: the engine's, which chunks that are kept as bytes do not tell.
    """

    def __init__(self, settings: Settings, kv_cache_dtype: str | None = None) -> None:
        self._settings = settings
        self._kv_cache_dtype = kv_cache_dtype
        self._made: dict[tuple[str, ChunkShape], Namespace] = {}
        self._making = threading.Lock()

    def name(self, chunk: ObjectKey, shape: ChunkShape) -> ChunkName:
        """Returns the name of a chunk. Raises ConfigError as `namespace` does."""
        namespace = self.namespace(chunk.model_name, shape)
        text = (
            namespace.digest
            + length_prefixed(chunk.chunk_hash)
            + length_prefixed(chunk.cache_salt.encode())
            + b"%d:%d" % (chunk.kv_rank, chunk.object_group_id)
        )
        digest = hashlib.sha256(text).digest()[:HASH_BYTES]
        (key,) = PromptKeys.named(namespace, [digest]).store_keys(_PARTS)
        return ChunkName(key, namespace.digest, digest)

    def namespace(self, model: str, shape: ChunkShape) -> Namespace:
        """Returns the namespace of a model's chunks of one shape.

        The first call for a model may read its weight files. Raises ConfigError where the weights
        or the kind of KV are not known.
        """
        with self._making:
            namespace = self._made.get((model, shape))
            if namespace is None:
                fields = self._fields(model, shape)
                namespace = self._made[model, shape] = Namespace(fields, _PARTS, 1)
            return namespace

    def _fields(self, model: str, shape: ChunkShape) -> dict[str, Json]:
        if self._kv_cache_dtype is None and any(dtype == "uint8" for dtype, _ in shape):
            raise ConfigError(
                f"the chunks of {model} are bytes, which any kind of KV can be: add the engine's"
                ' "kv_cache_dtype" to adapter_params'
            )
        salt = self._settings.salt.get_secret_value() if self._settings.salt else None
        return {
            "format": FORMAT_VERSION,
            "engine": "lmcache",
            "model": model,
            "weights": self._weights(model),
            "kv_cache_dtype": self._kv_cache_dtype,
            "tensors": [[dtype, list(sizes)] for dtype, sizes in shape],
            "salt": None if salt is None else hashlib.sha256(salt.encode()).hexdigest(),
            "seal": None if self._settings.seal_key_file is None else "aes-256-gcm",
        }

    def _weights(self, model: str) -> str:
        if self._settings.weights:
            return self._settings.weights
        directory = find_checkpoint(model)
        if directory is None:
            raise ConfigError(
                f"the checkpoint {model} is not on this host, so that its weights are not known:"
                " name their revision by PDSTORE_WEIGHTS"
            )
        return weights_revision(directory, self._settings)
