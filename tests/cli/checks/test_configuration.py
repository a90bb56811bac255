"""Checks of the settings: origins are told, secrets are not, and what cannot work is red."""

from __future__ import annotations

import pytest

from pdstore.cli.checks.configuration import check_settings, set_values
from pdstore.cli.checks.finding import Level
from pdstore.settings import read_settings

ON = {"pd_transfer_via_storage": True}


def levels(engine_block=16, **settings):
    found = check_settings(read_settings(**ON, **settings), frozenset(settings), engine_block)
    return {finding.subject: finding.level for finding in found}


def test_each_setting_has_its_origin_and_no_secret(monkeypatch):
    monkeypatch.setenv("PDSTORE_SALT", "pepper")
    monkeypatch.setenv("PDSTORE_STAGING", "2GiB")
    settings = read_settings(store="redis://me:secret@host/0")
    assert set_values(settings, frozenset({"store"})) == {
        "PDSTORE_STORE": ("redis://me:***@host/0", "--store"),
        "PDSTORE_SALT": ("(set)", "environment"),
        "PDSTORE_STAGING": ("2 GiB", "environment"),
    }


def test_the_switch_that_is_off_is_yellow():
    [finding] = check_settings(read_settings(), frozenset(), 16)
    assert finding.level is Level.WARN
    assert "PD_TRANSFER_VIA_STORAGE=1" in finding.remedy


def test_a_block_that_is_no_multiple_of_the_engines_is_red():
    assert levels(block_tokens=24)["block size"] is Level.BAD
    assert "block size" not in levels(block_tokens=24, engine_block=8)
    assert "block size" not in levels(block_tokens=64)


def test_a_store_of_one_process_is_red():
    assert levels(store="memory://here")["place"] is Level.BAD


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("redis://10.0.0.5/0", True),
        ("redis://127.0.0.1:6379", False),
        ("redis://user:p@localhost", False),
        ("redis://", False),
        ("redis:///3", False),
        ("redis://localhost.example.org", True),
        ("rediss://10.0.0.5/0", False),
        ("valkey+cluster://10.0.0.5:7000,10.0.0.6:7000", True),
        ("valkeys+cluster://10.0.0.5", False),
        ("valkey+unix:///run/valkey.sock", False),
        ("file:///x", False),
    ],
)
def test_kv_that_leaves_the_host_unencrypted_is_yellow(url, is_open):
    assert levels(store=url).get("encryption") is (Level.WARN if is_open else None)


def doubts(longest=None, **settings):
    found = check_settings(read_settings(**ON, **settings), frozenset(), 16, longest)
    return [(f.level, f.said, f.remedy) for f in found if f.subject == "settings"]


def test_a_decode_instance_that_never_loads_is_yellow_with_what_to_write():
    [(level, said, remedy)] = doubts(role="decode", load="never")
    assert level is Level.WARN
    assert said.startswith("PDSTORE_LOAD=never on a decode instance")
    assert remedy == "set PDSTORE_LOAD=always on D, or leave it unset"
    assert not doubts(role="prefill", load="never")
    assert not doubts(role="decode")


def test_a_prefill_instance_that_never_saves_is_yellow_with_what_to_write():
    [(level, said, remedy)] = doubts(role="prefill", publish=False)
    assert level is Level.WARN
    assert said.startswith("PDSTORE_PUBLISH=0 on a prefill instance")
    assert remedy == "set PDSTORE_PUBLISH=1 on P, or leave it unset"
    assert not doubts(role="both", publish=False)


@pytest.mark.parametrize(
    ("tokens", "longest", "why"),
    [
        (65536, None, "most prompts have less"),
        (65536, 40960, "no prompt has over 40960"),
        (64, 32, "no prompt has over 32"),
        (65536, 131072, None),
        (4096, None, None),
    ],
)
def test_blocks_that_no_prompt_fills_are_yellow_with_what_to_write(tokens, longest, why):
    found = doubts(longest, block_tokens=tokens)
    assert len(found) == bool(why)
    for level, said, remedy in found:
        assert level is Level.WARN
        assert said.startswith(f"PDSTORE_BLOCK_TOKENS={tokens}, and {why}:")
        assert remedy == "set PDSTORE_BLOCK_TOKENS=64, the same for P and D"
