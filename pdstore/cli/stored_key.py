"""StoredKey: the parts of a block key, read back from its text."""

from __future__ import annotations

import re
from typing import NamedTuple

from pdstore.format.keys import POOL_ID_KEY, BlockKey, Kind, kind_of

_HEX, _NUMBER = "([0-9a-f]{32})", "([0-9]{1,9})"  # whoever may write to a pool makes others, too
_BLOCK = re.compile(f"pds1:{_HEX}:{_NUMBER}:{_NUMBER}:{_HEX}(?::partial:{_NUMBER})?")
_MARKER = re.compile(f"pds1:{_HEX}:handoff:{_HEX}:{_NUMBER}:([a-z0-9]{{1,20}})")


class StoredKey(NamedTuple):
    """The parts of a key.

    name: the prefix hash of a block, the id of a hand-off.
    num_tokens: of a tail; None for whole blocks, whose key does not say.
    state: of a marker: started, done, failed, or stageN for the end of one pipeline stage.
    """

    kind: Kind
    namespace: str
    group: int = 0
    shard: int = 0
    name: str = ""
    num_tokens: int | None = None
    state: str | None = None

    @classmethod
    def of(cls, key: BlockKey) -> StoredKey | None:
        """Reads a key; None for one that pdstore does not make."""
        if key == POOL_ID_KEY:
            return cls(Kind.POOL, "")
        if block := _BLOCK.fullmatch(key):
            namespace, group, shard, name, tokens = block.groups()
            num_tokens = int(tokens) if tokens else None
            return cls(kind_of(key), namespace, int(group), int(shard), name, num_tokens)
        if marker := _MARKER.fullmatch(key):
            namespace, name, shard, state = marker.groups()
            return cls(Kind.HANDOFF, namespace, 0, int(shard), name, None, state)
        return None
