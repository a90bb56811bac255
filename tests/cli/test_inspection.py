"""`pdstore inspect` on real pools: right, damaged, foreign and missing values."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdstore.cli.inspection import inspect
from pdstore.errors import ConfigError
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.connect import seal_store
from pdstore.testing.values import get, put
from tests.support.command import run, save


@pytest.fixture
def keys(prompts):
    return prompts[0].store_keys(prompts[0].namespace.parts)


def replant(url, key, data):
    store = open_store(url, read_settings())
    store.remove([key])
    put(store, [key], [data])
    store.close()


def raw(url, key):
    store = open_store(url, read_settings())
    [data] = get(store, [key], [1064])
    store.close()
    return data


def test_a_right_value_shows_its_header(filled, prompts, keys):
    answer = inspect(filled, keys[2])
    assert answer.status == 0
    assert answer.document["verdict"] == "right"
    assert answer.document["bytes"] == 1064
    assert answer.document["num_tokens"] == 8
    assert answer.document["prefix_hash"] == prompts[0].hash_of(2).hex()
    assert answer.document["namespace"] == prompts[0].namespace.hex


def test_a_piece_that_only_one_key_has_is_enough(filled_file, prompts, keys):
    assert inspect(filled_file, prompts[0].hash_of(1).hex()[:10]).document["key"] == keys[1]
    with pytest.raises(ConfigError, match="6 keys have 'pds1'"):
        inspect(filled_file, "pds1")


def test_a_damaged_value_is_told(filled_file, keys):
    replant(filled_file, keys[0], raw(filled_file, keys[0])[:-1] + b"?")
    answer = inspect(filled_file, keys[0])
    assert answer.status == 1
    assert answer.document["verdict"].startswith("damaged")


def test_a_value_of_another_key_is_told(filled_file, keys):
    replant(filled_file, keys[0], raw(filled_file, keys[1]))
    answer = inspect(filled_file, keys[0])
    assert answer.status == 1
    assert answer.document["verdict"].startswith("foreign")


def test_a_sealed_value_is_read_with_its_key_and_with_no_other(file_url, prompts, keys, tmp_path):
    mine, other = (str(tmp_path / name) for name in ("mine", "other"))
    for path, digit in ((mine, "1"), (other, "2")):
        Path(path).write_text(digit * 64 + "\n")
        Path(path).chmod(0o600)
    settings = read_settings(seal_key_file=mine)
    store = seal_store(open_store(file_url, settings), settings)
    save(store, prompts[0])
    store.close()
    for path, verdict in ((mine, "right"), (other, "sealed with a key that is not")):
        ran = run("inspect", keys[0], "--store", file_url, PDSTORE_SEAL_KEY_FILE=path)
        assert verdict in ran.out, ran.err


@pytest.mark.redis
@pytest.mark.parametrize("name", ["long" * 30_000, "\x1b]0;title\x07", b"\xff\xfe", "9" * 5000])
def test_a_key_that_nobody_of_ours_made_harms_no_command(redis_server, prompts, name):
    server = redis_server()
    hostile = [b"pds1:" + (name if isinstance(name, bytes) else name.encode())]
    hostile.append(f"pds1:{'a' * 32}:{'9' * 5000}:0:{'b' * 32}".encode())
    with server.client() as raw:
        for key in hostile:
            raw.set(key, b"x")
    ran = run("inspect", hostile[0].decode("ascii", "replace")[:40], "--store", server.url)
    assert (ran.status, ran.err.startswith("pdstore: ")) == (2, True)
    assert "\x1b" not in ran.out + ran.err
    listed = run("ls", "--store", server.url)
    assert (listed.status, "\x1b" in listed.out) == (0, False)
    assert run("du", "--store", server.url).status == 0


def test_a_missing_value_is_status_1_and_nonsense_status_2(file_url, keys):
    ran = run("inspect", keys[0], "--store", file_url)
    assert (ran.status, ran.err) == (1, "")
    assert "missing" in ran.out
    ran = run("inspect", "nonsense", "--store", file_url)
    assert ran.status == 2
    assert "`pdstore ls` shows them" in ran.err
