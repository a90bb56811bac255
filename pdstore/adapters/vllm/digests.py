"""Digests of what tokens do not say: a prompt's images, sounds and videos, and LoRA adapters."""

# Decision: docs/decisions/044-contents.md
from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pdstore.errors import PDStoreError
from pdstore.format.keys import length_prefixed
from pdstore.format.weights import weight_files, weights_revision
from pdstore.settings import Settings

log = logging.getLogger("vllm.pdstore")

_CONFIG = "adapter_config.json"
_MAX_ADAPTERS = 4096


class NotAtHand(Exception):
    """Data that this process does not have, or in a form that it cannot read."""


class ItemDigests:
    """Makes digests of images, sounds and videos. Only one thread calls it.

    A conversation sends its images again with each turn, and vLLM's cache then gives the same
    object for each of them; as long as vLLM has the object, its digest is made only once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], bytes]] = {}  # by the object's id

    def digest_of(self, feature: Any) -> bytes:
        """Returns a sha256 of an item as the model gets it: its data, its kind, and its positions.

        feature: vLLM's MultiModalFeatureSpec.
        Raises NotAtHand if the data is elsewhere: in another process, or on a device.
        """
        mask = getattr(feature.mm_position, "is_embed", None)
        digest = hashlib.sha256()
        _add(digest, getattr(feature, "modality", ""))
        _add(digest, "everywhere" if mask is None else mask)
        digest.update(self._of_data(feature.data))
        return digest.digest()

    def _of_data(self, data: Any) -> bytes:
        if data is None or "address" in data:  # the place in vLLM's cache in shared memory
            raise NotAtHand("vLLM has the data in another process (--mm-processor-cache-type shm)")
        same, known = self._known.get(id(data), (lambda: None, b""))
        if same() is data:
            return known
        digest = hashlib.sha256()
        _add(digest, data)
        made, number = digest.digest(), id(data)

        def forget(_: Any) -> None:
            self._known.pop(number, None)

        with contextlib.suppress(TypeError):  # a plain dict has no weak references
            self._known[number] = weakref.ref(data, forget), made
        return made


def _add(digest: Any, value: Any) -> None:
    """Adds a nested value to a digest; different values never add the same bytes.

    Lists and tuples are alike, because vLLM's messages make lists of tuples.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise NotAtHand(f"a tensor on {value.device}")
        _add_head(digest, f"tensor {value.dtype} {list(value.shape)}")
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        _add_head(digest, f"array {value.dtype.str} {list(value.shape)}")
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        _add_head(digest, f"map {len(value)}")
        for name in sorted(value):
            _add_head(digest, name)
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        _add_head(digest, f"list {len(value)}")
        for each in value:
            _add(digest, each)
    else:
        _add_leaf(digest, value)


def _add_leaf(digest: Any, value: Any) -> None:
    if isinstance(value, str | bytes | bool | int | float):
        _add_head(digest, type(value).__name__)
        text = value if isinstance(value, bytes) else str(value).encode()
        digest.update(length_prefixed(text))
    elif hasattr(value, "field") and hasattr(value, "data"):  # vLLM's MultiModalFieldElem
        _add(digest, value.data)
    else:
        raise NotAtHand(f"a {type(value).__name__}")


def _add_head(digest: Any, text: str) -> None:
    digest.update(length_prefixed(text.encode()))


class _Files(NamedTuple):
    """The state of an adapter's files when they were read, and their digest; None: bypass."""

    stamps: tuple[Any, ...] | None
    digest: bytes | None


class AdapterDigests:
    """Makes digests of LoRA adapters' files, and notices later changes. Only one thread calls it.

    vLLM may load an adapter whose files changed, as long as it has KV and weights of the earlier
    files. So an adapter whose files ever changed has no digest any more.
    """

    def __init__(self) -> None:
        self._read: dict[str, _Files] = {}

    def digest_of(self, path: str) -> bytes | None:
        """Returns a digest of the files in a directory, which are read once.

        Returns None, and warns once, if the files cannot be read, or if their sizes, times of
        change or inodes are not those of the files that were read.
        """
        stamps, known = _stamps_of(path), self._read.get(path)
        if known is None:
            known = self._read_files(path, stamps)
        elif known.digest is not None and known.stamps != stamps:
            log.warning(
                "the files of the LoRA adapter in %s were replaced: requests with it bypass the"
                " pool until this instance restarts, because vLLM may still have the earlier ones."
                " Give each version of an adapter a directory and a name of its own",
                path,
            )
            known = _Files(None, None)
        self._read[path] = known
        return known.digest

    def _read_files(self, path: str, stamps: tuple[Any, ...] | None) -> _Files:
        try:
            if len(self._read) >= _MAX_ADAPTERS:
                raise PDStoreError(f"there were {_MAX_ADAPTERS} others since the start")
            digest = adapter_digest(path)
            if stamps is None or _stamps_of(path) != stamps:
                raise PDStoreError("its files change")
        except (PDStoreError, OSError) as error:
            log.warning("requests with the LoRA adapter in %s bypass the pool: %s", path, error)
            return _Files(None, None)
        return _Files(stamps, digest)


def adapter_digest(path: str) -> bytes:
    """Returns a digest of a LoRA adapter's weights and its configuration.

    Raises ConfigError or OSError if they cannot be read.
    """
    weights = weights_revision(path, Settings.model_construct(weights=None))
    config = (Path(path) / _CONFIG).read_bytes()
    return hashlib.sha256(config).digest() + weights.encode()


def _stamps_of(path: str) -> tuple[Any, ...] | None:
    """Returns what tells an adapter's files from others without reading them."""
    try:
        files = [*weight_files(path), Path(path) / _CONFIG]
        each = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in each)
