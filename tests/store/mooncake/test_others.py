"""A pool that others' variables or JSON file describe: `mooncake://` without a host takes it."""

from __future__ import annotations

import contextlib
import json
import os

import pytest

from pdstore.cli.doctor import doctor
from pdstore.environment import mooncake_sources
from pdstore.errors import ConfigError
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.mooncake.library import MooncakeConfig
from pdstore.store.mooncake.others import NAMES
from pdstore.store.url import StoreURL
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, put


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if "MOONCAKE_" in name:
            monkeypatch.delenv(name)


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Makes a MooncakeConfig of a URL, with variables and with the JSON file of others."""

    def make(url="mooncake://", file=None, named="MOONCAKE_CONFIG_PATH", **variables):
        if file is not None:
            path = tmp_path / "m.json"
            path.write_text(file if isinstance(file, str) else json.dumps(file))
            monkeypatch.setenv(named, str(path))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return MooncakeConfig.from_url(StoreURL.of(url))

    return make


MASTER = {"master_server_address": "m:1"}
VALUES = {
    "master": ("m:9", "m:9"),
    "metadata": ("http://m/x", "http://m/x"),
    "hostname": ("10.0.0.2:17000", "10.0.0.2"),
    "segment": ("1.5gb", 3 << 29),
    "protocol": ("RDMA", "rdma"),
    "devices": ("mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
    "prefer": ("10.0.0.9:1", "10.0.0.9:1"),
    "tenant": ("t", "t"),
    "metrics_port": ("9004", 9004),
}
"""A text that others write for each field, and the value that it means."""


def test_each_field_of_others_is_tried_here():
    assert VALUES.keys() == NAMES.keys()


@pytest.mark.parametrize(
    ("name", "variable"), [(name, v) for name, names in NAMES.items() for v in names.variables]
)
def test_the_variables_of_others_are_read(configured, name, variable):
    text, value = VALUES[name]
    master = {} if name == "master" else {"MOONCAKE_MASTER": "m:1"}
    url = "mooncake://?topology=embedded" if name == "segment" else "mooncake://"
    found = configured(url, **master, **{variable: text})
    assert getattr(found, name) == value
    assert found.origins[name] == variable


@pytest.mark.parametrize("named", ["MOONCAKE_CONFIG_PATH", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"])
@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, names in NAMES.items() for key in names.keys]
)
def test_the_file_of_others_is_read(configured, name, key, named):
    text, value = VALUES[name]
    master = {} if name == "master" else MASTER
    url = "mooncake://?topology=embedded" if name == "segment" else "mooncake://"
    file = {**master, key: text, "mode": "embedded", "local_buffer_size": "4gb"}
    found = configured(url, file=file, named=named)
    assert getattr(found, name) == value
    assert found.origins[name].startswith(f"{key} in /")
    assert found.buffer == 16 << 20, "others need more than pdstore"


def test_the_url_wins_over_the_file_and_the_file_over_the_variables(configured):
    file = {**MASTER, "tenant_id": "file", "protocol": "rdma"}
    found = configured("mooncake://?tenant=url", file=file, MOONCAKE_MASTER="env:1")
    assert (found.master, found.tenant, found.protocol) == ("m:1", "url", "rdma")
    assert "tenant=url (URL)" in found.described()
    assert "protocol=rdma (protocol in /" in found.described()


def test_a_url_with_a_host_reads_nothing_of_others(configured):
    others = {"MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_TENANT_ID": "t"}
    found = configured("mooncake://url:1", file="no JSON", MOONCAKE_MASTER="env:1", **others)
    assert (found.master, found.protocol, found.tenant) == ("url:1", "tcp", "default")


@pytest.mark.parametrize(
    ("written", "master"),
    [("m", "m:50051"), (" m:7 ", "m:7"), ("[::1]:7", "[::1]:7"), ("[::1]", "[::1]:50051")],
)
def test_a_master_without_its_port_has_the_masters_own(configured, written, master):
    assert configured(MOONCAKE_MASTER=written).master == master


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1:1", "0.0.0.0"])
def test_a_host_name_that_no_other_host_can_reach_is_not_taken(configured, name):
    assert configured(file={**MASTER, "local_hostname": name}).hostname == ""


def test_a_list_of_devices_is_one_text_and_auto_is_none(configured):
    assert configured(file={**MASTER, "rdma_devices": ["a", "b"]}).devices == "a,b"
    assert configured(file={**MASTER, "device_name": "auto-discovery"}).devices == ""


def test_a_segment_that_other_programs_lend_is_not_lent_and_that_is_told(configured):
    found = configured(file={**MASTER, "global_segment_size": "4GB"})
    assert found.segment == 0
    assert "a segment of 4GB (global_segment_size in /" in found.described()
    assert "topology=embedded would lend it" in found.described()


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({}, "the master is missing: write mooncake://HOST:PORT, or set MOONCAKE_MASTER"),
        ({"file": {}}, "or MOONCAKE_CONFIG_PATH to a JSON file with master_server_address"),
        ({"MOONCAKE_MASTER": ""}, "the master is missing"),
        ({"file": "{"}, r"m\.json is not valid JSON"),
        ({"file": "[" * 100_000}, r"m\.json is not valid JSON"),
        ({"file": "[1]"}, "is not a JSON object"),
        ({"file": {"master_server_adress": "m:1"}}, "did you mean master_server_address"),
        ({"MOONCAKE_MASTR": "m:1"}, "did you mean MOONCAKE_MASTER"),
        ({"MOONCAKE_MASTER": "etcd://a:1;b:1"}, "several masters: pdstore uses one"),
        ({"MOONCAKE_MASTER": "a:1,b:1"}, "several masters: pdstore uses one"),
        ({"MOONCAKE_MASTER": "m:x"}, "is no HOST:PORT"),
        ({"MOONCAKE_MASTER": "m:0"}, "is no HOST:PORT"),
        ({"file": {**MASTER, "tenant_id": True}}, "one tenant is needed"),
        ({"file": {**MASTER, "device_name": {"0": "mlx5_0"}}}, r"\?devices=\.\.\."),
        (
            {"MOONCAKE_MASTER": "m:1", "MOONCAKE_MASTER_METRICS_PORT": "x"},
            r"bad metrics_port 'x' \(MOONCAKE_MASTER_METRICS_PORT\)",
        ),
        (
            {
                "url": "mooncake://?topology=embedded",
                "file": {**MASTER, "global_segment_size": "4,5"},
            },
            r"bad segment '4,5' \(global_segment_size in .*: write a size",
        ),
    ],
)
def test_a_mistake_of_others_settings_is_refused_with_the_remedy(configured, given, hint):
    with pytest.raises(ConfigError, match=hint):
        configured(**given)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_a_file_that_cannot_be_read_is_named_with_its_variable(monkeypatch, tmp_path, content):
    file = tmp_path / "m.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    with pytest.raises(ConfigError, match=r"m\.json, of MOONCAKE_CONFIG_PATH"):
        mooncake_sources()


def test_no_password_is_shown(configured):
    metadata = "redis://:hush-hush@m:6379"
    found = configured(MOONCAKE_MASTER="m:1", MOONCAKE_TE_META_DATA_SERVER=metadata)
    assert found.metadata == metadata
    assert "redis://:***@m:6379 (MOONCAKE_TE_META_DATA_SERVER)" in found.described()


@pytest.mark.mooncake
def test_the_store_is_named_by_its_master_and_doctor_says_where_each_value_came_from(
    monkeypatch,
):
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", "127.0.0.1:9")
    with contextlib.closing(open_store("mooncake://?lease=2", Settings())) as store:
        assert store.label == "mooncake://127.0.0.1:9"
    found = {f["subject"]: f for f in doctor("mooncake://?lease=2").document["findings"]}
    said = found["mooncake"]["said"]
    assert "master=127.0.0.1:9 (MOONCAKE_MASTER_SERVER_ADDR)" in said
    assert "lease=2.0 (URL)" in said


@pytest.mark.mooncake
def test_a_real_pool_is_used_by_the_file_that_others_read(cluster, monkeypatch, tmp_path):
    file = tmp_path / "m.json"
    address = f"127.0.0.1:{cluster.port}"
    file.write_text(json.dumps({"local_hostname": "localhost", "master_server_address": address}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    [key] = fresh_keys(1)
    with cluster.open() as by_url, cluster.open("mooncake://") as by_file:
        put(by_url, [key], [b"x" * 4096])
        assert get(by_file, [key], [4096]) == [b"x" * 4096]
        assert by_file.label == f"mooncake://{address}"
