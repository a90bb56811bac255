"""The weights of a checkpoint: where they lie, and the text that tells two of one shape apart."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from pdstore.environment import weights_cache_file
from pdstore.errors import ConfigError
from pdstore.format.file_digest import SCHEME, digest_of_files, file_digest
from pdstore.settings import Settings

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_revision(model: str | Path, settings: Settings) -> str:
    """Returns PDSTORE_WEIGHTS if it is set, else the hub's commit, else a digest of the files.

    The digest covers the content only, neither names of directories nor times: every byte of small
    files, the header and samples of every tensor of large ones (`file_digest`). It differs for two
    checkpoints if any tensor was changed throughout, as training does. It may be equal if they
    differ only in a few rows of a large tensor, for example of an embedding: give such
    checkpoints names of their own by PDSTORE_WEIGHTS.

    model: a checkpoint's directory. A snapshot directory of the hub's cache is named by its commit.
      A file's digest is remembered by path, size, mtime and inode.
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
    digests = [(path.name, path.stat().st_size, remembered.digest_of(path)) for path in files]
    remembered.write()
    return "sha256:" + digest_of_files(digests)


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


class _Remembered:
    """Digests of files seen before. Without it the files are read again; nothing else is lost."""

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
        name = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}|{SCHEME}"
        if name not in self._digests:
            self._digests[name] = file_digest(path)
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
