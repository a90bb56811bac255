"""Stored values: headers, sums, envelopes."""

from __future__ import annotations

import hashlib
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdstore.errors import Reason
from pdstore.format.block import HEADER_BYTES, Header, checksum, read_header, seal, verify
from pdstore.format.envelope import ENVELOPE_BYTES, Envelopes
from pdstore.format.keys import BlockKey

HEADER = Header(1, 2, 3, 4, 5, 96, b"n" * 16, b"h" * 16)


def sealed(header: Header = HEADER, fill: int = 7) -> bytearray:
    value = bytearray([fill]) * (HEADER_BYTES + header.payload_bytes)
    seal(memoryview(value), header)
    return value


def test_a_sealed_value_verifies():
    assert verify(memoryview(sealed()), HEADER) is None
    assert read_header(memoryview(sealed())) == HEADER


def test_the_header_is_laid_out_as_the_format_says():
    value = sealed()
    assert value[:4] == b"PDSB"
    assert struct.unpack_from("<BBHHHIQ", value, 4) == (1, 1, 2, 3, 4, 5, 96)
    assert value[24:40] == b"n" * 16
    assert value[40:56] == b"h" * 16
    assert struct.unpack_from("<Q", value, 56)[0] == reference_checksum(value)


def reference_checksum(value: bytes) -> int:
    """The checksum of docs and `block.checksum`, written a second time."""
    summed = bytes(value[:56])
    for at in range(64, len(value), 4096):
        chunk = bytes(value[at : at + 4096])
        digest = xxhash.xxh3_64(chunk + bytes(4096 - len(chunk)))
        summed += digest.intdigest().to_bytes(8, "little")
    if len(value) > 64:
        summed += (len(value) - 64).to_bytes(8, "little")
    return xxhash.xxh3_64(summed).intdigest()


# Of format 2: the payload is 0, 1, 2, ... modulo 251, and the start 56 bytes of 7.
@pytest.mark.parametrize(
    ("payload_bytes", "want"),
    [
        (0, 0x70CA2A4093C1AF1B),
        (1, 0x9985A4AAFED80871),
        (4095, 0x6B9C8D381C518B0A),
        (4096, 0x61D7FDB27DF9CC87),
        (4097, 0x0924CF6C52932968),
        (20000, 0x2CE9964FD640D9FC),
    ],
)
def test_checksums_are_those_of_the_format(payload_bytes, want):
    payload = bytes(i % 251 for i in range(payload_bytes))
    value = bytes([7]) * HEADER_BYTES + payload
    assert checksum(memoryview(value)) == reference_checksum(value) == want


@given(st.integers(0, (HEADER_BYTES + 96) * 8 - 1))
def test_any_flipped_bit_is_corrupt(bit):
    value = sealed()
    value[bit // 8] ^= 1 << bit % 8
    assert verify(memoryview(value), HEADER) is Reason.CORRUPT


@pytest.mark.parametrize("field", [f for f in Header._fields if f != "payload_bytes"])
def test_a_whole_value_of_another_key_is_foreign(field):
    other = b"o" * 16 if isinstance(getattr(HEADER, field), bytes) else getattr(HEADER, field) + 1
    value = sealed(HEADER._replace(**{field: other}))
    assert verify(memoryview(value), HEADER) is Reason.FOREIGN


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_and_never_raise(data):
    assert verify(memoryview(data), HEADER) is Reason.CORRUPT
    assert read_header(memoryview(data)) is None


KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
RUN = bytes(range(100, 116))
NAME = BlockKey("pds1:" + "ab" * 16 + ":0:0:" + "cd" * 16)
VALUE = bytes(range(256)) * 3


def encrypted(envelopes, value=VALUE, name=NAME):
    envelope = bytearray(len(value) + ENVELOPE_BYTES)
    envelopes.encrypt(name, memoryview(value), memoryview(envelope))
    return envelope


def decrypted(envelopes, envelope, name=NAME):
    """The value, or the reason why there is none."""
    value = bytearray(len(envelope) - ENVELOPE_BYTES)
    reason = envelopes.decrypt(name, memoryview(envelope), memoryview(value))
    return reason or bytes(value)


def test_the_format_is_fixed():
    envelope = encrypted(Envelopes([KEY], RUN))
    head = b"PDSE\x01\0\0\0" + bytes.fromhex("0a92703e8217e27b") + RUN + bytes(8)
    assert bytes(envelope[:40]) == head
    assert hashlib.sha256(envelope).hexdigest() == (
        "264d4b4af01da81f291ad5a1a97b63dcd2a8571b5e557c72a68c389cd2b7c9c4"
    )
    assert decrypted(Envelopes([KEY]), envelope) == VALUE


def test_a_value_without_an_envelope_is_no_value():
    assert decrypted(Envelopes([KEY]), bytearray(b"PDSB" + VALUE)) is Reason.FORGED


def test_a_value_under_another_block_key_is_forged():
    envelope = encrypted(Envelopes([KEY]))
    assert decrypted(Envelopes([KEY]), envelope, BlockKey(NAME + ":partial:3")) is Reason.FORGED


def test_each_flipped_bit_is_noticed():
    envelopes = Envelopes([KEY])
    envelope = encrypted(envelopes, VALUE[:64])
    for at in range(len(envelope)):
        envelope[at] ^= 1 << at % 8
        expected = Reason.OTHER_SEAL if at == 4 or 8 <= at < 16 else Reason.FORGED
        assert decrypted(envelopes, envelope) is expected, at
        envelope[at] ^= 1 << at % 8
    assert decrypted(envelopes, envelope) == VALUE[:64]


def test_during_a_rotation_both_keys_read_and_the_first_one_writes():
    before, during, after = Envelopes([KEY]), Envelopes([OTHER, KEY]), Envelopes([OTHER])
    assert decrypted(during, encrypted(before)) == VALUE
    assert decrypted(after, encrypted(during)) == VALUE
    assert decrypted(before, encrypted(during)) is Reason.OTHER_SEAL


def test_no_value_is_encrypted_like_another():
    """One run numbers its values, and two writers have two runs."""
    one, other = Envelopes([KEY]), Envelopes([KEY])
    heads = {bytes(encrypted(envelopes)[:40]) for envelopes in (one, one, other)}
    assert len(heads) == 3


def test_keys_of_runs_differ():
    """Equal numbers in two runs are no equal nonces of one key."""
    first, second = (encrypted(Envelopes([KEY], bytes([n] * 16))) for n in (1, 2))
    assert first[40:] != second[40:]
    second[16:32] = first[16:32]
    assert decrypted(Envelopes([KEY]), second) is Reason.FORGED
