"""The weights of a checkpoint: finds their files, and digests them to tell checkpoints apart."""

# Decision: docs/decisions/009-weights-digest.md
from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pdstore.errors import ConfigError
from pdstore.settings import Settings

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
WHOLE_UP_TO = 1 << 30
_SAMPLE_BYTES = 16 << 10
_SAMPLES_PER_FILE = 1024
_MIN_SAMPLES = 2  # a tensor's first bytes and its last bytes
_LARGEST_HEADER = 100_000_000  # the limit of safetensors: github.com/huggingface/safetensors
_READ_BYTES = 1 << 20


def weights_revision(model: str | Path, settings: Settings) -> str:
    """Returns PDSTORE_WEIGHTS if it is set, else the hub's commit, else a digest of the files.

    The digest covers the names, sizes and contents of the files. Large files are read in part
    (`file_digest`), so checkpoints that differ only in a few rows of a large tensor may have the
    same digest. Then give each checkpoint a name of its own by PDSTORE_WEIGHTS.

    model: a checkpoint's directory. The commit is known only for a snapshot's directory in the
      cache of the Hugging Face hub, because it is that directory's name.
    Raises ConfigError where there are no weight files.
    """
    if settings.weights:
        return settings.weights
    directory = Path(model)
    if directory.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", directory.name):
        return "commit:" + directory.name
    files = weight_files(directory)
    if not files:
        raise ConfigError(
            f"no weight files in {directory}: name the weights' revision by PDSTORE_WEIGHTS"
        )
    lines = [f"{p.name}\0{p.stat().st_size}\0{file_digest(p)}\n" for p in files]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def weight_files(directory: str | Path) -> list[Path]:
    """Returns the files with weights in a checkpoint's directory, in order of their names."""
    return sorted(p for p in Path(directory).glob("*") if p.suffix in _SUFFIXES and p.is_file())


def find_checkpoint(model: str, revision: str | None = None) -> Path | None:
    """Returns a checkpoint's directory on this host; None if the host does not have it.

    model: a directory, or a name on the Hugging Face hub, which is looked up in the hub's cache.
    revision: a revision of the hub's repository; None for its main branch.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def file_digest(path: Path, whole_up_to: int = WHOLE_UP_TO) -> str:
    """Returns a sha256 of the file, in hex.

    It covers every byte of a file of at most `whole_up_to` bytes, and of any file that is not
    safetensors. For a larger safetensors file it covers the header, every byte of small tensors,
    and evenly spaced samples of every other tensor, with that tensor's first and last bytes.
    Reading all bytes could delay a large model's start by minutes, if the file system is slow.
    """
    size = path.stat().st_size
    is_whole = size <= whole_up_to or path.suffix != ".safetensors"
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for begin, end in [(0, size)] if is_whole else _spans_of(file, size):
            for data in _read(file, begin, end):
                digest.update(data)
    return digest.hexdigest()


def _spans_of(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Returns the byte ranges to digest of a large safetensors file; all if its header is bad."""
    data_at = 8 + int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(b"".join(_read(file, 8, min(data_at, _LARGEST_HEADER))))
        tensors = sorted(t["data_offsets"] for name, t in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [(0, size)]
    count = max(_MIN_SAMPLES, _SAMPLES_PER_FILE // max(1, len(tensors)))
    spans = [(0, data_at)]
    for begin, end in tensors:
        last = end - begin - _SAMPLE_BYTES
        if end - begin <= count * _SAMPLE_BYTES:
            spans.append((data_at + begin, data_at + end))
            continue
        starts = [data_at + begin + last * i // (count - 1) for i in range(count)]
        spans += [(start, start + _SAMPLE_BYTES) for start in starts]
    return spans


def _read(file: BinaryIO, at: int, end: int) -> Iterator[bytes]:
    while at < end and (data := os.pread(file.fileno(), min(_READ_BYTES, end - at), at)):
        yield data
        at += len(data)
