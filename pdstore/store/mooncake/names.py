"""The names that each setting of Mooncake has in URLs, JSON files and variables; its parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

Value: TypeAlias = str | int | float | bool | list["Value"] | dict[str, "Value"] | None

MOST_CONNECTIONS = 64
TOPOLOGIES = ("holder", "embedded", "shared")
_UNITS = {"": 0, "b": 0, "k": 1, "kb": 1, "kib": 1, "m": 2, "mb": 2, "mib": 2}
_UNITS |= {"g": 3, "gb": 3, "gib": 3, "t": 4, "tb": 4, "tib": 4}


class Names(NamedTuple):
    """A setting's names in a URL, in JSON files and in the environment, and its parser."""

    options: tuple[str, ...]
    keys: tuple[str, ...]
    variables: tuple[str, ...]
    parse: Callable[[Value], object]


def parse_size(value: Value) -> int:
    """Reads a number of bytes, or a number with a unit of 1,024 (`4gb`, `512 MiB`, `1.5g`)."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(value).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("write bytes, or a number and a unit, like 4GB")
    return int(float(match[1]) * 1024 ** _UNITS[match[2]])


def _text(value: Value) -> str:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("write a text")


def _lower(value: Value) -> str:
    return _text(value).lower()


def _topology(value: Value) -> str:
    if _lower(value) not in TOPOLOGIES:
        raise ValueError(f"write one of {', '.join(TOPOLOGIES)}")
    return _lower(value)


def _mode(value: Value) -> str:
    modes = {"embedded": "embedded", "standalone-store": "holder"}
    if _lower(value) not in modes:
        raise ValueError(f"write one of {', '.join(modes)}")
    return modes[_lower(value)]


def _flag(value: Value) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError("write 1 or 0")
    return words[str(value).lower()]


def _seconds(value: Value) -> float:
    seconds = float(_text(value)) if not isinstance(value, float) else value
    if not 0 < seconds < 1e6:
        raise ValueError("write a positive number of seconds")
    return seconds


def _port(value: Value) -> int:
    port = int(_text(value))
    if not 0 < port < 65536:
        raise ValueError("write a port")
    return port


def _count(value: Value) -> int:
    count = int(_text(value))
    if not 0 < count <= MOST_CONNECTIONS:
        raise ValueError(f"write a number from 1 to {MOST_CONNECTIONS}")
    return count


def _devices(value: Value) -> str:
    """Reads NICs from a text, a list, or a map of ranks to NICs; returns all, comma-separated."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        value = json.loads(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return ",".join(dict.fromkeys(_text(item) for item in value))
    return "" if value == "auto-discovery" else _text(value)


NAMES: dict[str, Names] = {
    "master": Names(
        (),
        ("master_server_address", "master_server_addr"),
        ("MOONCAKE_MASTER", "MOONCAKE_MASTER_SERVER_ADDR"),
        _text,
    ),
    "metrics_port": Names(
        ("metrics_port",), ("master_metrics_port",), ("MOONCAKE_MASTER_METRICS_PORT",), _port
    ),
    "topology": Names(("topology",), (), (), _topology),
    "mode": Names((), ("mode",), (), _mode),
    "standalone": Names((), ("standalone_storage",), ("MOONCAKE_STANDALONE_STORAGE",), _flag),
    "client": Names(("client",), ("client_server_address",), ("MOONCAKE_CLIENT",), _text),
    "metadata": Names(
        ("metadata",),
        ("metadata_server",),
        ("MOONCAKE_TE_META_DATA_SERVER", "MOONCAKE_METADATA_SERVER"),
        _text,
    ),
    "hostname": Names(
        ("hostname",),
        ("local_hostname",),
        ("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"),
        _text,
    ),
    "segment": Names(
        ("segment",), ("global_segment_size",), ("MOONCAKE_GLOBAL_SEGMENT_SIZE",), parse_size
    ),
    "buffer": Names(
        ("buffer",), ("local_buffer_size",), ("MOONCAKE_LOCAL_BUFFER_SIZE",), parse_size
    ),
    "protocol": Names(("protocol",), ("protocol",), ("MOONCAKE_PROTOCOL",), _lower),
    "devices": Names(
        ("devices",),
        ("device_name", "rdma_devices"),
        ("MOONCAKE_DEVICE", "MOONCAKE_RDMA_DEVICES"),
        _devices,
    ),
    "prefer": Names(("prefer",), ("preferred_segment",), ("MOONCAKE_PREFERRED_SEGMENT",), _text),
    "tenant": Names(("tenant",), ("tenant_id",), ("MOONCAKE_TENANT_ID",), _text),
    "ssd": Names(
        ("ssd",),
        ("enable_ssd_offload", "enable_offload"),
        ("MOONCAKE_OFFLOAD_ENABLED", "MOONCAKE_ENABLE_SSD_OFFLOAD"),
        _flag,
    ),
    "ssd_path": Names(
        ("ssd_path",), ("ssd_offload_path",), ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",), _text
    ),
    "http": Names(
        ("http",),
        ("enable_client_http_server",),
        ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",),
        _flag,
    ),
    "http_port": Names(
        ("http_port",), ("client_http_port",), ("MOONCAKE_CLIENT_HTTP_PORT",), _port
    ),
    "connections": Names(("connections",), (), (), _count),
    "lease_s": Names(("lease",), (), (), _seconds),
    "discard_s": Names(("discard",), (), (), _seconds),
}
UNUSED_KEYS = (
    *("check_server", "transfer_timeout", "storage_root_dir"),
    *("prefer_local_alloc", "prefer_alloc_in_same_node"),
)
UNUSED_VARIABLES = (
    *("MOONCAKE_CONFIG_PATH", "MOONCAKE_CHECK_SERVER"),
    "MOONCAKE_STORE_CHECKSUM",
)
