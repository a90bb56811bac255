"""MooncakeConfig: the names of all who configure Mooncake, who wins, and what is refused."""

from __future__ import annotations

import json
import os

import pytest

from pdstore.environment import MooncakeSources, mooncake_sources
from pdstore.errors import ConfigError
from pdstore.store.mooncake.config import MooncakeConfig
from pdstore.store.url import StoreURL


def config(url="mooncake://m:1", *, file=None, path="m.json", **variables):
    text = json.dumps(file) if isinstance(file, dict) else file
    sources = MooncakeSources(variables, None if file is None else path, text)
    return MooncakeConfig.of(StoreURL.of(url), sources)


@pytest.fixture
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MOONCAKE_", "MC_")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_a_url_alone_is_enough():
    found = config("mooncake://10.0.0.1:5000")
    assert (found.master, found.topology, found.segment) == ("10.0.0.1:5000", "holder", 0)
    assert found.protocol == "tcp"


def test_the_port_may_be_left_out():
    assert config("mooncake://host").master == "host:50051"


def test_more_connections_over_tcp():
    assert config("mooncake://m:1?connections=4").connections == 4


def test_every_option_of_the_url():
    found = config(
        "mooncake://m:1?topology=embedded&segment=4GB&buffer=1mb&protocol=RDMA&devices=mlx5_0,mlx5_1"
        "&hostname=10.0.0.2&metadata=http://m:8080/metadata&prefer=h:1&tenant=t&lease=10&discard=9"
        "&ssd=1&ssd_path=/nvme&http=1&http_port=9301&client=h:2"
    )
    assert found == MooncakeConfig(
        master="m:1",
        topology="embedded",
        client="h:2",
        metadata="http://m:8080/metadata",
        hostname="10.0.0.2",
        segment=4 << 30,
        buffer=1 << 20,
        protocol="rdma",
        devices="mlx5_0,mlx5_1",
        prefer="h:1",
        tenant="t",
        ssd=True,
        ssd_path="/nvme",
        http=True,
        http_port=9301,
        lease_s=10.0,
        discard_s=9.0,
    )


FILES = {
    "Mooncake": {
        "local_hostname": "10.0.0.2",
        "metadata_server": "http://m:8080/metadata",
        "global_segment_size": "3gb",
        "local_buffer_size": 1 << 30,
        "protocol": "rdma",
        "device_name": "mlx5_0",
        "master_server_address": "m:9",
    },
    "vLLM": {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "4GB",
        "local_buffer_size": "4GB",
        "protocol": "rdma",
        "device_name": "",
        "master_server_address": "m:9",
        "enable_offload": False,
        "preferred_segment": "h:1",
    },
    "SGLang": {
        "local_hostname": "10.0.0.2",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "m:9",
        "protocol": "rdma",
        "device_name": '{"0": "mlx5_0", "1": "mlx5_1"}',
        "global_segment_size": "4gb",
        "check_server": True,
        "master_metrics_port": 9003,
        "tenant_id": "t",
        "enable_ssd_offload": True,
        "ssd_offload_path": "/nvme",
    },
    "LMCache": {
        "mooncake_master_server_addr": "m:9",
        "master_server_addr": "not this one",
        "global_segment_size": 3355443200,
        "transfer_timeout": 1,
        "storage_root_dir": "",
        "mooncake_prefer_local_alloc": True,
    },
    "FastDeploy": {
        "master_server_addr": "m:9",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 1 << 30,
        "local_buffer_size": 16777216,
        "protocol": "rdma",
        "rdma_devices": ["mlx5_0", "mlx5_1", "mlx5_0"],
    },
}


@pytest.mark.parametrize("user", FILES)
def test_the_json_file_of_each_user_of_mooncake_is_read(user):
    found = config("mooncake://", file=FILES[user])
    assert found.master == "m:9"
    assert found.topology == "embedded"
    assert found.segment == {"Mooncake": 3 << 30, "LMCache": 3355443200, "FastDeploy": 1 << 30}.get(
        user, 4 << 30
    )
    if user in ("SGLang", "FastDeploy"):
        assert found.devices == "mlx5_0,mlx5_1"


def test_a_holder_of_its_own_is_what_vllm_calls_a_standalone_store():
    file = {"mode": "standalone-store", "master_server_address": "m:9", "global_segment_size": 0}
    assert config("mooncake://", file=file).topology == "holder"
    with pytest.raises(ConfigError, match=r"set segment to 0"):
        config("mooncake://", file=file | {"global_segment_size": "4GB"})


VARIABLES = [
    ("MOONCAKE_MASTER", "m:9", "master", "m:9"),
    ("MOONCAKE_MASTER_SERVER_ADDR", "m:9", "master", "m:9"),
    ("MOONCAKE_TE_META_DATA_SERVER", "x", "metadata", "x"),
    ("MOONCAKE_METADATA_SERVER", "x", "metadata", "x"),
    ("MOONCAKE_LOCAL_HOSTNAME", "h", "hostname", "h"),
    ("LOCAL_HOSTNAME", "h", "hostname", "h"),
    ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "h", "hostname", "h"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1.5gb", "segment", 3 << 29),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", "512k", "buffer", 512 << 10),
    ("MOONCAKE_PROTOCOL", "RDMA", "protocol", "rdma"),
    ("MOONCAKE_DEVICE", "auto-discovery", "devices", ""),
    ("MOONCAKE_RDMA_DEVICES", "mlx5_0", "devices", "mlx5_0"),
    ("MOONCAKE_STANDALONE_STORAGE", "1", "topology", "shared"),
    ("MOONCAKE_CLIENT", "h:7", "client", "h:7"),
    ("MOONCAKE_PREFERRED_SEGMENT", "h:8", "prefer", "h:8"),
    ("MOONCAKE_TENANT_ID", "t", "tenant", "t"),
    ("MOONCAKE_OFFLOAD_ENABLED", "true", "ssd", True),
    ("MOONCAKE_ENABLE_SSD_OFFLOAD", "0", "ssd", False),
    ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/d", "ssd_path", "/d"),
    ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "on", "http", True),
    ("MOONCAKE_CLIENT_HTTP_PORT", "9301", "http_port", 9301),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), VARIABLES)
def test_each_variable_of_each_user_of_mooncake_is_read(environment, name, text, field, value):
    environment.setenv(name, text)
    url = "mooncake://" if "MASTER" in name else "mooncake://m:1"
    found = MooncakeConfig.of(StoreURL.of(url), mooncake_sources())
    assert getattr(found, field) == value
    assert found.origins[field].startswith("MOONCAKE_") or found.origins[field] == name


@pytest.mark.parametrize("name", ["MOONCAKE_CONFIG_PATH", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"])
def test_the_file_is_named_by_a_variable(environment, tmp_path, name):
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "m:9"}')
    environment.setenv(name, str(path))
    found = MooncakeConfig.of(StoreURL.of("mooncake://"), mooncake_sources())
    assert found.master == "m:9"
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*mooncake\.json"):
        mooncake_sources()


def test_the_url_wins_over_the_environment_and_that_over_the_file():
    file = {"master_server_address": "file:1", "protocol": "file", "tenant_id": "file"}
    found = config("mooncake://url:1", file=file, MOONCAKE_MASTER="env:1", MOONCAKE_PROTOCOL="rdma")
    assert (found.master, found.protocol, found.tenant) == ("url:1", "rdma", "file")
    described = found.describe()
    for part in (
        "master=url:1 (URL)",
        "protocol=rdma (MOONCAKE_PROTOCOL)",
        "tenant=file (m.json)",
        "segment=0 (default)",
    ):
        assert part in described


def test_a_segment_meant_for_other_programs_is_not_lent_by_one_that_lends_nothing():
    found = config("mooncake://m:1?topology=holder", MOONCAKE_GLOBAL_SEGMENT_SIZE="4gb")
    assert (found.topology, found.segment) == ("holder", 0)
    assert config(MOONCAKE_GLOBAL_SEGMENT_SIZE="4gb").topology == "embedded"


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ({"url": "mooncake://m:1?segmnet=4GB"}, "did you mean 'segment'"),
        ({"file": {"master_server_adress": "m:1"}}, "did you mean 'master_server_address'"),
        ({"file": {"local_bufer_size": 1}}, "did you mean 'local_buffer_size'"),
        ({"MOONCAKE_MASTR": "m:1"}, "did you mean MOONCAKE_MASTER"),
        ({"url": "mooncake://m:1?zzzz=1"}, "known: .*segment"),
        ({"url": "mooncake://m:1/path"}, "has no path"),
        ({"url": "mooncake://"}, "set MOONCAKE_MASTER"),
        ({"url": "mooncake://m:1?topology=both"}, "holder, embedded, shared"),
        ({"url": "mooncake://m:1?topology=embedded"}, "segment=4GB"),
        ({"url": "mooncake://m:1?topology=shared&segment=4GB"}, "set segment to 0"),
        ({"url": "mooncake://m:1?segment=much"}, r"bad segment 'much' \(URL\)"),
        ({"url": "mooncake://m:1?lease=0"}, "positive"),
        ({"url": "mooncake://m:1?connections=0"}, "from 1 to 64"),
        ({"url": "mooncake://m:1?topology=shared&connections=2"}, "a topology other than shared"),
        ({"url": "mooncake://m:1?protocol=rdma&connections=2"}, "needs protocol=tcp"),
        ({"MOONCAKE_CLIENT_HTTP_PORT": "0"}, r"\(MOONCAKE_CLIENT_HTTP_PORT\)"),
        ({"file": "{"}, r"m\.json is not valid JSON"),
        ({"file": "[1]"}, "is not a JSON object"),
        ({"file": {"mode": "both"}}, r"bad mode 'both' \(m\.json\)"),
        ({"file": {"tenant_id": True}}, "write a text"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_right(mistake, hint):
    with pytest.raises(ConfigError, match=hint):
        config(**mistake)


def test_the_librarys_own_variables_are_left_alone():
    config(MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES="1", MC_LOG_LEVEL="INFO")
