"""read_seal_keys: one key, two during a rotation, and errors that quote no key."""

from __future__ import annotations

import os
import traceback

import pytest

from pdstore.errors import ConfigError
from pdstore.store.seal import read_seal_keys

A, B = "ab" * 32, "0C" * 32


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "seal.key"

    def write(text, mode=0o600):
        path.write_bytes(text.encode("latin-1"))
        path.chmod(mode)
        return path

    return write


def test_the_first_key_comes_first(key_file):
    assert read_seal_keys(key_file(f"{A}\n")) == [bytes.fromhex(A)]
    text = f"# since March\n{B}\n\n  {A}  \r\n"
    assert read_seal_keys(key_file(text, 0o400)) == [bytes.fromhex(B), bytes.fromhex(A)]


def test_a_link_to_a_key_is_fine(key_file, tmp_path):
    (tmp_path / "link").symlink_to(key_file(A))
    assert read_seal_keys(tmp_path / "link") == [bytes.fromhex(A)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 keys: write one"),
        (f"{A}\n{B}\n{A[:-2]}00", "3 keys: write one"),
        (A[1:], "not 64 hex digits; make one with"),
        (A[1:] + "x", "not 64 hex digits"),
        (f"{A}\n{A.upper()}", "are the same one"),
        (A + "\xe9", "is no key file"),
        (f"#{'x' * 5000}\n{A}", "is no key file"),
    ],
)
def test_a_file_that_is_wrong_is_told_without_quoting_it(key_file, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_seal_keys(key_file(text))
    assert "PDSTORE_SEAL_KEY_FILE" in str(caught.value)
    assert A[2:-2] not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_open_is_refused(key_file, mode):
    with pytest.raises(ConfigError, match=f"mode {mode:o}.: chmod 600"):
        read_seal_keys(key_file(A, mode))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "."):
        with pytest.raises(ConfigError, match="is not a file"):
            read_seal_keys(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot read .* make a key with .umask 077"):
        read_seal_keys(tmp_path / "missing")
