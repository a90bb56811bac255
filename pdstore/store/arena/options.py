"""ArenaOptions: where an arena is and how large, from a shm:// URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError
from pdstore.store.url import StoreURL

DEFAULT_LEASE_S = 10.0
MAX_LEASE_S = 3600.0
DEFAULT_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class ArenaOptions(NamedTuple):
    """The options of an arena; `ArenaStore` says what they mean."""

    name: str
    directory: Path
    size: int | None
    slab_bytes: int | None
    lease_s: float

    @classmethod
    def of(cls, url: StoreURL) -> ArenaOptions:
        """Takes a URL's options. Raises ConfigError for those that cannot be read."""
        if url.path not in ("", "/") or url.port is not None:
            raise ConfigError(f"{url.label}: write shm://name, and the directory as ?dir=/dev/shm")
        size, slab_bytes = url.size("size", 0) or None, url.size("slab", 0) or None
        lease_s = url.seconds("lease", DEFAULT_LEASE_S)
        directory = Path(url.options.pop("dir", str(DEFAULT_DIRECTORY)))
        url.finish("size, lease, dir, slab")
        return cls(url.host or "pool", directory, size, slab_bytes, lease_s)

    def check(self) -> None:
        """Raises ConfigError for what no arena can have."""
        label = f"shm://{self.name}"
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{label}: a name has 1 to 64 of a-z, 0-9, '.', '_' and '-'")
        if not self.lease_s <= MAX_LEASE_S:
            raise ConfigError(f"{label}: lease must be at most {MAX_LEASE_S:g} seconds")
        if not self.directory.is_dir():
            raise ConfigError(f"{label}: {self.directory} is no directory: name one with ?dir=")
