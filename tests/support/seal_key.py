"""Seal key files for tests."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_seal_key(path: Path, *keys: str) -> Path:
    """Writes a seal key file, with a new key if none is given."""
    path.write_text("\n".join(keys or [secrets.token_hex(32)]))
    path.chmod(0o600)
    return path
