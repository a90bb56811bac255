"""The weights' revision: what tells two checkpoints of one shape apart."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path

from pdstore.environment import weights_cache_file
from pdstore.errors import ConfigError
from pdstore.settings import Settings

_WHOLE_UP_TO = 1 << 30
_HEAD_BYTES = 1 << 20
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_revision(model: str | Path, settings: Settings) -> str:
    """PDSTORE_WEIGHTS if it is set, else the hub's commit, else a digest of the weight files.

    model: a checkpoint's directory. Its name and path do not matter, only what is in it. A snapshot
      directory of the hub's cache is named by its commit. A digest is remembered by path, size,
      mtime and inode.
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
    remembered = _Remembered(weights_cache_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(
            f"{path.name}\0{path.stat().st_size}\0{remembered.digest_of(path)}\n".encode()
        )
    remembered.write()
    return "sha256:" + digest.hexdigest()


def content_digest(path: Path) -> str:
    """sha256 of a file: whole up to 1 GiB, else of its first MiB and 256 even samples."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE_UP_TO:
            while chunk := file.read(_HEAD_BYTES):
                digest.update(chunk)
            return digest.hexdigest()
        digest.update(file.read(_HEAD_BYTES))
        for i in range(_NUM_SAMPLES):
            file.seek(_HEAD_BYTES + (size - _HEAD_BYTES - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class _Remembered:
    """Digests of files seen before. Losing it costs a second look at the files, nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            read = json.loads(path.read_text())
        except (OSError, ValueError):
            read = None
        self._digests: dict[str, str] = read if isinstance(read, dict) else {}

    def digest_of(self, path: Path) -> str:
        stat = path.stat()
        name = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if name not in self._digests:
            self._digests[name] = content_digest(path)
            self._changed = True
        return self._digests[name]

    def write(self) -> None:
        if not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{secrets.token_hex(4)}")
            temporary.write_text(json.dumps(self._digests))
            temporary.replace(self._path)
        except OSError:
            return


def _is_commit(name: str) -> bool:
    return len(name) == 40 and all(c in "0123456789abcdef" for c in name)
