"""The bytes of a stored value: a 64-byte header, then the payload; seals and verifies values."""

# Decision: docs/decisions/001-pool-verifies.md
from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from pdstore.errors import Reason

HEADER_BYTES = 64
CHUNK_BYTES = 4096
VERSION = 1
FLAG_TAIL = 1
FLAG_MARKER = 2

_MAGIC = b"PDSB"
# magic, version, Header's fields in their order, checksum
_HEADER = struct.Struct("<4sBBHHHIQ16s16sQ")
_SUM = struct.Struct("<Q")
START_BYTES = HEADER_BYTES - _SUM.size
"""Length of what `start_of` returns: a header without the checksum at its end."""


class Header(NamedTuple):
    """The header of a value. `verify` compares every field with the header that a key asks for."""

    flags: int
    group: int
    shard: int
    num_shards: int
    num_tokens: int
    payload_bytes: int
    namespace: bytes  # 16 bytes
    prefix_hash: bytes  # 16 bytes; in a marker: the id of a hand-off or of an instance


def start_of(header: Header) -> bytes:
    """Returns a value's first 56 bytes: its header without the checksum."""
    return _HEADER.pack(_MAGIC, VERSION, *header, 0)[:START_BYTES]


def header_of(start: bytes) -> Header:
    """Returns the header whose first 56 bytes are `start`, as `start_of` made them."""
    return Header(*_HEADER.unpack(start + bytes(8))[2:-1])


def seal(value: memoryview, header: Header) -> None:
    """Writes the header and its checksum into a value whose payload is written already.

    value: memory of HEADER_BYTES + header.payload_bytes bytes.
    """
    value[:START_BYTES] = start_of(header)
    write_checksum(value)


def write_checksum(value: memoryview, computed: int | None = None) -> None:
    """Writes the checksum into a value whose other bytes are written already.

    computed: the value's `checksum` if the caller knows it; None to compute it.
    """
    _SUM.pack_into(value, START_BYTES, checksum(value) if computed is None else computed)


def is_right(value: memoryview, start: bytes, computed: int | None = None) -> bool:
    """Returns whether a value of the right length is right; it is quicker than `verify`.

    start: the result of `start_of` for the expected header.
    """
    if value[:START_BYTES] != start:
        return False
    (stored,) = _SUM.unpack_from(value, START_BYTES)
    return bool(stored == (checksum(value) if computed is None else computed))


def verify(value: memoryview, expected: Header, computed: int | None = None) -> Reason | None:
    """Returns why this value must not be used, or None if it may be.

    CORRUPT: the value is damaged. FOREIGN: the value is undamaged, but belongs to another key.
    computed: the value's `checksum` if the caller knows it; None to compute it.
    """
    header = read_header(value, computed)
    if header is None:
        return Reason.CORRUPT
    return None if header == expected else Reason.FOREIGN


def read_header(value: memoryview, computed: int | None = None) -> Header | None:
    """Returns a value's header, compared with no key's; None if the value is damaged."""
    if len(value) < HEADER_BYTES:
        return None
    magic, version, *fields, stored = _HEADER.unpack_from(value)
    if (magic, version) != (_MAGIC, VERSION):
        return None
    is_whole = stored == (checksum(value) if computed is None else computed)
    return Header(*fields) if is_whole else None


def checksum(value: memoryview) -> int:
    """Returns a value's checksum: the xxh3_64 of the header's first 56 bytes and of digests.

    Each digest is the xxh3_64 of CHUNK_BYTES of the payload. For its digest, a shorter last chunk
    is filled up with zeros. The payload's length is added behind the digests. Each digest takes
    eight bytes, little-endian, and so does the length. If the payload is empty, no digest and no
    length are added. A GPU can compute the digests of all chunks in parallel.
    """
    payload = value[HEADER_BYTES:]
    chunks = [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]
    if chunks and len(chunks[-1]) < CHUNK_BYTES:
        chunks[-1] = memoryview(bytes(chunks[-1]).ljust(CHUNK_BYTES, b"\0"))
    digest = xxhash.xxh3_64(value[:START_BYTES])
    if chunks:
        sums = [*map(xxhash.xxh3_64_intdigest, chunks), len(payload)]
        digest.update(struct.pack(f"<{len(sums)}Q", *sums))
    return digest.intdigest()
