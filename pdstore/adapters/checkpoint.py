"""find_checkpoint: the directory of a model that an engine names by path or by hub name."""

from __future__ import annotations

from pathlib import Path


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
