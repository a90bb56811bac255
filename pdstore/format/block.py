"""Stored values: a 64-byte header, then the payload; sealed before put, verified after get."""

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
"""Length of `start_of`: the header without the checksum, which follows it."""


class Header(NamedTuple):
    """The header of a value. Every field is compared with what the value's key asks for."""

    flags: int
    group: int
    shard: int
    num_shards: int
    num_tokens: int
    payload_bytes: int
    namespace: bytes  # 16 bytes
    prefix_hash: bytes  # 16 bytes; of a marker: the hand-off's id or the instance's


def start_of(header: Header) -> bytes:
    """Returns a value's first 56 bytes: its header without the checksum."""
    return _HEADER.pack(_MAGIC, VERSION, *header, 0)[:START_BYTES]


def header_of(start: bytes) -> Header:
    """Returns the header that `start_of` packed."""
    return Header(*_HEADER.unpack(start + bytes(8))[2:-1])


def seal(value: memoryview, header: Header) -> None:
    """Writes the header, with the checksum, in front of a payload that is in place.

    value: HEADER_BYTES + header.payload_bytes long.
    """
    value[:START_BYTES] = start_of(header)
    write_checksum(value)


def write_checksum(value: memoryview, computed: int | None = None) -> None:
    """Writes the checksum of a value whose other bytes are all there.

    computed: the `checksum` of these very bytes, where it is known already.
    """
    _SUM.pack_into(value, START_BYTES, checksum(value) if computed is None else computed)


def is_right(value: memoryview, start: bytes, computed: int | None = None) -> bool:
    """True if `verify` would accept a value of the right length; it is quicker than `verify`.

    start: `start_of` the expected header.
    """
    if value[:START_BYTES] != start:
        return False
    (stored,) = _SUM.unpack_from(value, START_BYTES)
    return bool(stored == (checksum(value) if computed is None else computed))


def verify(value: memoryview, expected: Header, computed: int | None = None) -> Reason | None:
    """Returns why this value must not be used, or None if it may be.

    CORRUPT: the value is damaged. FOREIGN: it is whole, but belongs to another key.
    computed: the `checksum` of these very bytes, where it is known already.
    """
    header = read_header(value, computed)
    if header is None:
        return Reason.CORRUPT
    return None if header == expected else Reason.FOREIGN


def read_header(value: memoryview, computed: int | None = None) -> Header | None:
    """Returns the header of a value, whatever its key; None if the value is damaged."""
    if len(value) < HEADER_BYTES:
        return None
    magic, version, *fields, stored = _HEADER.unpack_from(value)
    if (magic, version) != (_MAGIC, VERSION):
        return None
    is_whole = stored == (checksum(value) if computed is None else computed)
    return Header(*fields) if is_whole else None


def checksum(value: memoryview) -> int:
    """Returns the xxh3_64 of the header without its checksum and of the payload's digests.

    A digest is the xxh3_64 of one chunk: CHUNK_BYTES of the payload. The last chunk is filled up
    with zeros. The payload's length follows the digests. Each digest and the length have eight
    bytes, little-endian; a value without a payload has neither. A GPU can compute the checksum
    because the chunks' digests can be computed in parallel.
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
