"""What identifies each format that pdstore writes: for a comparison with what releases wrote.

`python -m tests.format.released` writes the formats of this version into `released.json`: at a
release, after the version was raised.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pdstore
from pdstore.format import block
from pdstore.format.envelope import ENVELOPE_BYTES
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import (
    FORMAT_VERSION,
    POOL_ID_KEY,
    PURGE_PREFIX,
    Namespace,
    Part,
    PromptKeys,
)
from pdstore.native.library import ABI

RECORD = Path(__file__).parent / "vectors" / "released.json"
_PARTS = (Part(0, 0), Part(1, 2))
_KEYS = PromptKeys(Namespace({"format": FORMAT_VERSION}, _PARTS, 4), cache_salt=b"salt").extend(
    range(6)
)


def formats() -> dict[str, object]:
    """The identity of each format: a number where it has one, else a digest of a sample."""
    namespace = _KEYS.namespace
    header = block.Header(1, 2, 3, 4, 5, 600, namespace.digest, _KEYS.hash_of(0))
    value = memoryview(bytearray(block.HEADER_BYTES + 600))
    block.seal(value, header)
    handoff = HandoffId("ab" * 16)
    markers = [handoff.done(namespace, 1), handoff.failed(namespace)]
    marker = handoff.marker(namespace, 1, 2, 6)
    return {
        "namespace": FORMAT_VERSION,
        "keys": _digest(*_KEYS.store_keys(_PARTS), POOL_ID_KEY, PURGE_PREFIX),
        "block": block.VERSION,
        "block sample": _digest(bytes(value)),
        "marker sample": _digest(*markers, repr(tuple(marker))),
        "envelope bytes": ENVELOPE_BYTES,
        "native interface": ABI,
    }


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def recorded() -> dict[str, dict[str, object]]:
    """The formats by version, the oldest release first."""
    return json.loads(RECORD.read_text())


def main() -> None:
    known = recorded() if RECORD.exists() else {}
    known[pdstore.__version__] = formats()
    RECORD.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
