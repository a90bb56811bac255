"""The stored value: a 64-byte header, then the payload; sealed before put, verified after get."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from pdstore.outcome import Reason

HEADER_BYTES = 64
VERSION = 1
FLAG_TAIL = 1
FLAG_MARKER = 2

_MAGIC = b"PDSB"
# magic, version, Header's fields in their order, checksum
_HEADER = struct.Struct("<4sBBHHHIQ16s16sQ")
_UNSUMMED = HEADER_BYTES - 8


class Header(NamedTuple):
    """What a value says of itself; every field is compared with what its key asked for."""

    flags: int
    group: int
    shard: int
    num_shards: int
    num_tokens: int
    payload_bytes: int
    namespace: bytes  # 16 bytes
    prefix_hash: bytes  # 16 bytes; of a marker: the attempt


def seal(value: memoryview, header: Header) -> None:
    """Writes the header before the payload that is in place already.

    value: exactly HEADER_BYTES + header.payload_bytes long.
    """
    if len(value) != HEADER_BYTES + header.payload_bytes:
        raise ValueError(f"{len(value)} bytes for a payload of {header.payload_bytes}")
    _HEADER.pack_into(value, 0, _MAGIC, VERSION, *header, 0)
    struct.pack_into("<Q", value, _UNSUMMED, checksum(value))


def verify(value: memoryview, expected: Header, computed: int | None = None) -> Reason | None:
    """Why this value must not be used: CORRUPT, or FOREIGN (whole, of another key); else None.

    computed: the `checksum` of these very bytes, where it is known already.
    """
    if len(value) < HEADER_BYTES:
        return Reason.CORRUPT
    magic, version, *fields, stored = _HEADER.unpack_from(value)
    if magic != _MAGIC or version != VERSION:
        return Reason.CORRUPT
    if stored != (checksum(value) if computed is None else computed):
        return Reason.CORRUPT
    return None if Header(*fields) == expected else Reason.FOREIGN


def read_header(value: memoryview) -> Header | None:
    """The header of an undamaged value, whatever key it belongs to; None if it is damaged."""
    if len(value) < HEADER_BYTES:
        return None
    header = Header(*_HEADER.unpack_from(value)[2:-1])
    return header if verify(value, header) is None else None


def checksum(value: memoryview) -> int:
    """xxh3_64 over the header without its checksum, then the payload."""
    digest = xxhash.xxh3_64(value[:_UNSUMMED])
    digest.update(value[HEADER_BYTES:])
    return digest.intdigest()
