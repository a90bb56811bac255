"""fields_of_others: reads a Mooncake pool's description as other users of Mooncake keep it.

vLLM, SGLang, LMCache and FastDeploy read a JSON file at MOONCAKE_CONFIG_PATH, or MOONCAKE_*
variables. `mooncake://` without a host takes the same, so that the pool need not be named twice.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pdstore.environment import MooncakeSources
from pdstore.errors import ConfigError


class Names(NamedTuple):
    """Names of one field of `MooncakeConfig` in a JSON file, and in the environment, best first."""

    keys: Sequence[str]
    variables: Sequence[str]


NAMES = {
    "master": Names(
        ("master_server_address", "master_server_addr"),
        ("MOONCAKE_MASTER", "MOONCAKE_MASTER_SERVER_ADDR"),
    ),
    "metadata": Names(
        ("metadata_server",), ("MOONCAKE_TE_META_DATA_SERVER", "MOONCAKE_METADATA_SERVER")
    ),
    "hostname": Names(
        ("local_hostname",), ("MOONCAKE_LOCAL_HOSTNAME", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME")
    ),
    "segment": Names(("global_segment_size",), ("MOONCAKE_GLOBAL_SEGMENT_SIZE",)),
    "protocol": Names(("protocol",), ("MOONCAKE_PROTOCOL",)),
    "devices": Names(("device_name", "rdma_devices"), ("MOONCAKE_DEVICE", "MOONCAKE_RDMA_DEVICES")),
    "prefer": Names(("preferred_segment",), ("MOONCAKE_PREFERRED_SEGMENT",)),
    "tenant": Names(("tenant_id",), ("MOONCAKE_TENANT_ID",)),
    "metrics_port": Names(("master_metrics_port",), ("MOONCAKE_MASTER_METRICS_PORT",)),
}
"""Names of others. Not among them: `local_buffer_size`, of which pdstore needs far less."""

_PORT = 50051  # the master's own default
_NEAR = 0.9
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")  # noqa: S104 - compared, not bound


class Given(NamedTuple):
    """The value of a field as others wrote it, and where: a variable, or a key of a file."""

    value: object
    origin: str


def fields_of_others(sources: MooncakeSources) -> dict[str, Given]:
    """Returns the fields that the JSON file has, or if there is no file, the variables.

    An empty value counts as none. Raises ConfigError for a file that is no JSON object, for a name
    that is nearly a known one, and for a value that pdstore cannot use.
    """
    layer = _of_variables(sources.variables) if sources.text is None else _of_file(sources)
    found = {name: given for name, given in layer if given.value not in ("", None, [])}
    return {name: given for name, given in map(_made_ours, found.items()) if given.value != ""}


def _of_file(sources: MooncakeSources) -> Iterator[tuple[str, Given]]:
    try:
        config = json.loads(sources.text or "")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{sources.path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{sources.path} is not a JSON object of Mooncake's settings")
    _refuse_slips(
        config, [key for names in NAMES.values() for key in names.keys], f"{sources.path}: "
    )
    for name, names in NAMES.items():
        for key in names.keys:
            if config.get(key) not in ("", None):
                yield name, Given(config[key], f"{key} in {sources.path}")
                break


def _of_variables(variables: Mapping[str, str]) -> Iterator[tuple[str, Given]]:
    known = [variable for names in NAMES.values() for variable in names.variables]
    _refuse_slips(variables, known, "")
    for name, names in NAMES.items():
        for variable in names.variables:
            if variables.get(variable):
                yield name, Given(variables[variable], variable)
                break


def _refuse_slips(given: Mapping[str, object], known: Sequence[str], where: str) -> None:
    """Raises ConfigError for a name that is nearly a known one; others' further names may stay."""
    for name in given:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        if near and name not in known:
            raise ConfigError(f"{where}unknown {name}: did you mean {near[0]}?")


def _made_ours(field: tuple[str, Given]) -> tuple[str, Given]:
    """Returns a field with its value in the form that `MooncakeConfig` takes."""
    name, (value, origin) = field
    if name == "devices" and isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, dict | list | bool):
        raise ConfigError(
            f"mooncake://: {origin} is {json.dumps(value)[:80]}, and one {name} is needed: write it"
            f" into the URL, as mooncake://HOST:PORT?{name}=..."
        )
    text = str(value).strip()
    if name == "master":
        return name, Given(_master_of(text, origin), origin)
    if name == "hostname":  # of several connections, each needs a port of its own
        host = text if text.count(":") > 1 else text.partition(":")[0]
        return name, Given("" if host in _LOCAL else host, origin)
    return name, Given(value if name == "segment" else text, origin)


def _master_of(text: str, origin: str) -> str:
    if "://" in text or "," in text or ";" in text:
        raise ConfigError(
            f"mooncake://: {origin} is {text}, which names several masters: pdstore uses one, so"
            " write mooncake://HOST:PORT of the one that leads"
        )
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return f"{text}:{_PORT}"
    if not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        raise ConfigError(f"mooncake://: {origin} is {text}, which is no HOST:PORT")
    return text
