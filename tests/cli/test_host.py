"""Checks of settings and of this host: origins, memory, limits, the library, huge pages."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from pdstore.cli.answer import Level
from pdstore.cli.doctor import doctor
from pdstore.cli.host import (
    check_limits,
    check_memory,
    check_native,
    check_pages,
    check_settings,
    check_traces,
)
from pdstore.settings import read_settings
from tests.support.otlp_receiver import receiving

ON = {"pd_transfer_via_storage": True}


def levels(engine_block=16, **settings):
    found = check_settings(read_settings(**ON, **settings), engine_block)
    return {finding.subject: finding.level for finding in found}


def test_each_setting_has_its_origin_and_no_secret(monkeypatch):
    monkeypatch.setenv("PDSTORE_SALT", "pepper")
    monkeypatch.setenv("PDSTORE_STAGING", "2GiB")
    settings = read_settings(store="redis://me:secret@host/0")
    found = check_settings(settings, 16)
    assert {f.subject: f.said for f in found if f.level is Level.INFO} == {
        "PDSTORE_STORE": "redis://me:***@host/0 (argument)",
        "PDSTORE_SALT": "********** (environment)",
        "PDSTORE_STAGING": "2.0GiB (environment)",
    }


@pytest.mark.misconfiguration("`PDSTORE_*` is set, and the switch is missing")
@pytest.mark.misconfiguration("the switch is off on D")
def test_the_switch_that_is_off_is_yellow():
    [finding] = check_settings(read_settings(), 16)
    assert finding.level is Level.WARN
    assert "PD_TRANSFER_VIA_STORAGE=1" in finding.remedy


@pytest.mark.misconfiguration("`VLLM_PLUGINS` without `pdstore`, or with blanks in it")
@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (None, None),
        ("pdstore", None),
        ("other,pdstore", None),
        ("", "pdstore"),
        ("other", "other,pdstore"),
        ("other, pdstore", "other,pdstore"),
    ],
)
def test_plugins_of_vllm_that_leave_pdstore_out_are_yellow(monkeypatch, names, wanted):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if names is not None:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    found = [f for f in check_settings(read_settings(**ON), 16) if f.subject == "plugins"]
    assert [f.level for f in found] == ([Level.WARN] if wanted else [])
    assert [f"VLLM_PLUGINS={wanted}," in f.remedy for f in found] == [True] * len(found)
    assert not [f for f in check_settings(read_settings(), 16) if f.subject == "plugins"]


def test_a_library_that_is_switched_off_is_not_to_be_built():
    [finding] = check_native(read_settings(**ON, native="off"), 0)
    assert (finding.level, finding.remedy) == (Level.WARN, "unset PDSTORE_NATIVE")


@pytest.mark.misconfiguration("`PDSTORE_TRACES` names no OTLP receiver")
def test_the_receiver_of_traces_is_asked():
    with receiving() as receiver:
        [right] = check_traces(read_settings(traces=receiver.url))
    [away] = check_traces(read_settings(traces=receiver.url))
    assert (right.level, away.level) == (Level.OK, Level.WARN)
    assert away.said.startswith(f"PDSTORE_TRACES={receiver.url}: spans will be lost: nothing ans")
    assert "like http://HOST:4318" in away.remedy
    assert not receiver.spans


def test_https_to_a_receiver_of_traces_without_tls_says_what_to_write():
    with receiving() as receiver:
        [finding] = check_traces(read_settings(traces=receiver.url.replace("http", "https")))
    assert "speaks no TLS: write http://" in finding.said


def test_a_receiver_of_traces_that_hangs_is_given_two_seconds():
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        [finding] = check_traces(read_settings(traces=url), timeout_s=0.2)
    assert finding.level is Level.WARN


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TOKENS=24` with engine blocks of 16")
def test_a_block_that_is_no_multiple_of_the_engines_is_red():
    assert levels(block_tokens=24)["block size"] is Level.BAD
    assert "block size" not in levels(block_tokens=24, engine_block=8)
    assert "block size" not in levels(block_tokens=64)


@pytest.mark.misconfiguration("`memory://` between processes")
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
    found = check_settings(read_settings(**ON, **settings), 16, longest)
    return [(f.level, f.said, f.remedy) for f in found if f.subject == "settings"]


@pytest.mark.misconfiguration("`PDSTORE_LOAD=never` on a decode instance")
def test_a_decode_instance_that_never_loads_is_yellow_with_what_to_write():
    [(level, said, remedy)] = doubts(role="decode", load="never")
    assert level is Level.WARN
    assert said.startswith("PDSTORE_LOAD=never on a decode instance")
    assert remedy == "set PDSTORE_LOAD=always on D, or leave it unset"
    assert not doubts(role="prefill", load="never")
    assert not doubts(role="decode")


@pytest.mark.misconfiguration("`PDSTORE_PUBLISH=0` on a prefill instance")
def test_a_prefill_instance_that_never_saves_is_yellow_with_what_to_write():
    [(level, said, remedy)] = doubts(role="prefill", publish=False)
    assert level is Level.WARN
    assert said.startswith("PDSTORE_PUBLISH=0 on a prefill instance")
    assert remedy == "set PDSTORE_PUBLISH=1 on P, or leave it unset"
    assert not doubts(role="both", publish=False)


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TOKENS` that no prompt fills")
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


GIB = 1 << 30


@pytest.mark.misconfiguration("staging above the host's memory")
@pytest.mark.parametrize(
    ("staging", "level"), [("40GiB", Level.BAD), ("13GiB", Level.WARN), ("1GiB", Level.OK)]
)
def test_staging_is_compared_with_the_free_memory(staging, level):
    [finding] = check_memory(read_settings(staging=staging), 24 * GIB)
    assert finding.level is level
    assert bool(finding.remedy) is (level is not Level.OK)


@pytest.mark.misconfiguration("`ulimit -l` is below staging, with RDMA")
def test_locked_memory_below_staging_is_red_for_rdma():
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, limits[1]))
    try:
        over = {
            url: {f.subject: f for f in check_limits(read_settings(store=url), 0)}
            for url in ("mooncake://h:1?protocol=rdma", "mooncake://h:1?protocol=tcp")
        }
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    rdma, tcp = over.values()
    assert rdma["locked memory"].level is Level.BAD
    assert "ulimit -l unlimited" in rdma["locked memory"].remedy
    assert "locked memory" not in tcp


@pytest.mark.misconfiguration("`ulimit -n 256`")
def test_few_open_files_are_yellow():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        [finding] = check_limits(read_settings(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (finding.subject, finding.level) == ("open files", Level.WARN)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
25 22 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,inode64
30 22 0:30 / /mnt/pool rw - tmpfs tmpfs rw,size=73400320k,huge=always
31 22 0:31 / /mnt/pool/advised rw - tmpfs tmpfs rw,huge=advise
32 22 0:32 / /mnt/my\\040pool rw - tmpfs tmpfs rw,huge=always
"""


@pytest.mark.misconfiguration("`shm://` or `file://` on a tmpfs without huge pages, with GPUs")
@pytest.mark.parametrize(
    ("remedy", "path", "num_gpus", "level"),
    [
        ("huge=always", "/mnt/pool/pdstore-0-pool", 2, Level.OK),
        ("huge=always", "/mnt/my pool/pdstore-0-pool", 2, Level.OK),
        ("huge=always", "/mnt/pool/advised/pdstore-0-pool", 2, Level.WARN),
        ("huge=always", "/dev/shm/pdstore-0-pool", 2, Level.WARN),
        ("huge=always", "/dev/shm/pdstore-0-pool", 0, Level.INFO),
        ("huge=always", "/dev/shmother/pdstore-0-pool", 2, Level.INFO),  # on the disk
        ("huge=within_size", "/mnt/pool/files", 2, Level.OK),
        ("huge=within_size", "/mnt/pool/advised/files", 2, Level.WARN),
        ("huge=within_size", "/dev/shm/pool", 2, Level.WARN),
        ("huge=within_size", "/dev/shm/pool", 0, Level.INFO),
    ],
)
def test_a_tmpfs_without_huge_pages_is_yellow_where_there_are_gpus(remedy, path, num_gpus, level):
    is_arena = remedy == "huge=always"
    [finding] = check_pages(Path(path), MOUNTS, num_gpus, is_arena=is_arena)
    assert finding.level is level
    assert (remedy in finding.remedy) is (level is Level.WARN)


@pytest.mark.parametrize("url", ["file://{}/pool", "shm://pages?size=1GiB&slab=4MiB&dir={}"])
def test_the_doctor_looks_at_the_pages_of_files_and_arenas(url, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"{MOUNTS}40 22 0:40 / {tmp_path} rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr("pdstore.cli.doctor.MOUNTS", mounts)
    document = doctor(url.format(tmp_path), count_gpus=lambda: 0).document
    assert [f["level"] for f in document["findings"] if f["subject"] == "huge pages"] == ["info"]
