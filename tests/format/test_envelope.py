"""Envelopes: only a holder of the key reads or makes a value, and only under its own block key."""

from __future__ import annotations

import hashlib

from pdstore.format.envelope import ENVELOPE_BYTES, Envelopes
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason

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


def test_another_key_does_not_read_it():
    assert decrypted(Envelopes([OTHER]), encrypted(Envelopes([KEY]))) is Reason.OTHER_SEAL


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
