"""Envelopes: stored values encrypted and authenticated by a seal key, with AES-256-GCM.

    envelope  head | ciphertext, as long as the value | tag, 16 bytes
    head      "PDSE" | the version, 1 byte | 3 zero bytes | key id, 8 bytes | run, 16 bytes
              | number, u64 little-endian

    key id    the first 8 bytes of sha256("pdstore seal key id" | seal key)
    run key   HKDF-SHA256(seal key, no salt, "pdstore run key" | run), 32 bytes
    nonce     4 zero bytes | number
    with it authenticated: head | the text of the value's key (associated data)

A run is the random name of one writer. The writer numbers the values that it encrypts. So a run key
is never used twice with the same nonce, even if many writers share a seal key.
`tests/format/test_block.py` fixes the format.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pdstore.errors import Reason

if TYPE_CHECKING:
    from pdstore.format.keys import BlockKey

SEAL_KEY_BYTES = 32
_RUN_BYTES = 16
_TAG_BYTES = 16
_MAGIC = b"PDSE"
_VERSION = 1
# magic, version, key id, run, number
_HEAD = struct.Struct("<4sB3x8s16sQ")
ENVELOPE_BYTES = _HEAD.size + _TAG_BYTES
"""Bytes that an envelope adds to its value."""
_MAX_RUNS = 1024  # maximum number of run keys in memory; a pool has fewer writers


class Envelopes:
    """Encrypts values, and decrypts envelopes that were made with one of its seal keys.

    Any thread may call it.

    keys: seal keys of SEAL_KEY_BYTES each. The first one encrypts; every one may decrypt.
    run: a name for this writer that no writer has had before; None makes a random name.
    """

    added_bytes = ENVELOPE_BYTES

    def __init__(self, keys: Sequence[bytes], run: bytes | None = None) -> None:
        self._keys = {seal_key_id(key): key for key in keys}
        self.key_id = seal_key_id(keys[0])
        self._run = secrets.token_bytes(_RUN_BYTES) if run is None else run
        self._numbers = itertools.count()
        self._run_key = lru_cache(_MAX_RUNS)(self._derive)

    def encrypt(self, key: BlockKey, value: memoryview, envelope: memoryview) -> None:
        """Encrypts `value` into `envelope`, which is ENVELOPE_BYTES longer."""
        number = next(self._numbers)
        head = _HEAD.pack(_MAGIC, _VERSION, self.key_id, self._run, number)
        envelope[: _HEAD.size] = head
        cipher = self._run_key(self.key_id, self._run)
        cipher.encrypt_into(_nonce(number), value, head + key.encode(), envelope[_HEAD.size :])

    def decrypt(self, key: BlockKey, envelope: memoryview, value: memoryview) -> Reason | None:
        """Decrypts `envelope` into `value`. Returns why `value` must not be used, else None.

        OTHER_SEAL: the envelope has another version, or none of these seal keys made it. FORGED:
        the bytes are no envelope, or were changed, or were encrypted for another `key`. In all
        these cases `value` may hold any bytes.
        """
        head = bytes(envelope[: _HEAD.size])
        magic, version, key_id, run, number = _HEAD.unpack(head)
        if magic != _MAGIC:
            return Reason.FORGED
        if version != _VERSION or key_id not in self._keys:
            return Reason.OTHER_SEAL
        cipher = self._run_key(key_id, run)
        text = envelope[_HEAD.size :]
        try:
            cipher.decrypt_into(_nonce(number), text, head + key.encode(), value)
        except InvalidTag:
            return Reason.FORGED
        return None

    def _derive(self, key_id: bytes, run: bytes) -> AESGCM:
        kdf = HKDF(SHA256(), SEAL_KEY_BYTES, salt=None, info=b"pdstore run key" + run)
        return AESGCM(kdf.derive(self._keys[key_id]))


def seal_key_id(key: bytes) -> bytes:
    """Returns the name of a seal key in envelopes, from which nobody can compute the key."""
    return hashlib.sha256(b"pdstore seal key id" + key).digest()[:8]


def _nonce(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "little")
