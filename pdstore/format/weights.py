"""The weights of a checkpoint: where they lie, and the digest that tells two of one shape apart."""

# Decision: docs/decisions/009-weights-digest.md
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pdstore.errors import ConfigError
from pdstore.settings import Settings

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
WHOLE_UP_TO = 1 << 30
_SAMPLE_BYTES = 16 << 10
_SAMPLES_PER_FILE = 1024
_LEAST_SAMPLES = 2  # of a tensor: its first and its last bytes
_LARGEST_HEADER = 100_000_000  # the format's own bound: github.com/huggingface/safetensors
_READ_BYTES = 1 << 20


def weights_revision(model: str | Path, settings: Settings) -> str:
    """Returns PDSTORE_WEIGHTS if it is set, else the hub's commit, else a digest of the files.

    The digest covers the content only, neither names of directories nor times: every byte of small
    files, the header and samples of every tensor of large ones (`file_digest`). It differs for two
    checkpoints if any tensor was changed throughout, as training does. It may be equal if they
    differ only in a few rows of a large tensor, for example of an embedding: give such
    checkpoints names of their own by PDSTORE_WEIGHTS.

    model: a checkpoint's directory. A snapshot directory of the hub's cache is named by its commit.
    Raises ConfigError where there are no weight files.
    """
    if settings.weights:
        return settings.weights
    directory = Path(model)
    if directory.parent.name == "snapshots" and _is_commit(directory.name):
        return "commit:" + directory.name
    files = sorted(p for p in directory.glob("*") if p.suffix in _SUFFIXES and p.is_file())
    if not files:
        raise ConfigError(
            f"no weight files in {directory}: name the weights' revision by PDSTORE_WEIGHTS"
        )
    lines = [f"{p.name}\0{p.stat().st_size}\0{file_digest(p)}\n" for p in files]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def find_checkpoint(model: str, revision: str | None = None) -> Path | None:
    """Returns a checkpoint's directory, of a hub's name its snapshot in the hub's cache.

    revision: of the hub's repository; None for its main branch.
    Returns None where neither is on this host.
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


def _is_commit(name: str) -> bool:
    return len(name) == 40 and all(c in "0123456789abcdef" for c in name)


class Span(NamedTuple):
    """Bytes of a file: from `begin` up to, not including, `end`."""

    begin: int
    end: int


def file_digest(path: Path, whole_up_to: int = WHOLE_UP_TO) -> str:
    """Returns a sha256 of the file, in hex.

    It covers every byte of a file of at most `whole_up_to` bytes, and of any file that is not
    safetensors. Of larger safetensors it covers the header and, of every tensor, evenly spread
    samples with its first and its last bytes; small tensors whole. A read of all would keep the
    start of a large model waiting for minutes where its files are far away.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        spans = [Span(0, size)] if size <= whole_up_to else _spans_of(file, size)
        for span in spans:
            for data in _read(file, span):
                digest.update(data)
    return digest.hexdigest()


def samples_of(tensor: Span, count: int) -> list[Span]:
    """Returns `count` even samples of a tensor, the first and the last bytes among them.

    One span with the whole tensor if samples would cover as much.
    """
    length = tensor.end - tensor.begin
    if length <= count * _SAMPLE_BYTES:
        return [tensor]
    begins = [tensor.begin + (length - _SAMPLE_BYTES) * i // (count - 1) for i in range(count)]
    return [Span(begin, begin + _SAMPLE_BYTES) for begin in begins]


def _spans_of(file: BinaryIO, size: int) -> list[Span]:
    """Returns the spans to read of a large file: samples of safetensors, else all of it."""
    data_at, tensors = _tensors_of(file, size)
    if not tensors:
        return [Span(0, size)]
    count = max(_LEAST_SAMPLES, _SAMPLES_PER_FILE // len(tensors))
    spans = [Span(0, data_at)]
    for tensor in sorted(tensors):
        spans += samples_of(Span(data_at + tensor.begin, data_at + tensor.end), count)
    return spans


def _tensors_of(file: BinaryIO, size: int) -> tuple[int, Sequence[Span]]:
    """Returns where a safetensors file's data begins, and the tensors' spans in it.

    No tensors for any other file.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
        return 0, []
    try:
        header = json.loads(b"".join(_read(file, Span(8, 8 + length))))
        spans = [Span(*t["data_offsets"]) for name, t in header.items() if name != "__metadata__"]
        ends = size - 8 - length
        is_right = all(type(at) is int for span in spans for at in span) and all(
            0 <= span.begin <= span.end <= ends for span in spans
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0, []
    return (8 + length, spans) if is_right else (0, [])


def _read(file: BinaryIO, span: Span) -> Iterator[bytes]:
    at = span.begin
    while at < span.end and (data := os.pread(file.fileno(), min(_READ_BYTES, span.end - at), at)):
        yield data
        at += len(data)
