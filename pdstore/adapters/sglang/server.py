"""pdstore's settings, and the model's dtype, weights and shape, from SGLang's own arguments."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdstore.errors import ConfigError
from pdstore.format.namespace import SHAPING, canonical, shaping
from pdstore.format.weights import find_checkpoint, weights_revision
from pdstore.settings import Settings, read_engine_settings

log = logging.getLogger(__name__)

VERSIONS = "0.5.17 to 0.5.23"
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size")
_PREFIXES_OF_SGLANG = ("prefetch_", "hicache_")
_FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


class ServedModel(NamedTuple):
    """The part of a namespace that the host pool cannot tell.

    dtype: torch's name of the KV cache's element type.
    weights: the weights' revision.
    rope: as `Layout` takes it.
    quantization: how weights and KV are scaled; None if both are as the checkpoint has them.
    """

    dtype: str
    weights: str
    rope: str
    quantization: str | None


def settings_of(extra_config: Mapping[str, Any]) -> Settings:
    """Returns the settings; `--hicache-storage-backend-extra-config` wins over the environment.

    A key of it is a setting in lower case without PDSTORE_, or one that SGLang itself reads.
    Raises ConfigError.
    """
    return read_engine_settings(
        **{
            name: value
            for name, value in extra_config.items()
            if name not in _OF_SGLANG and not name.startswith(_PREFIXES_OF_SGLANG)
        }
    )


def refuse_unsupported(storage_config: Any, args: Any) -> None:
    """Raises ConfigError, with the reason, for a server that the backend cannot serve."""
    refusals = {
        "pipeline parallelism": storage_config.pp_size > 1,
        "context parallelism of attention": storage_config.attn_cp_size > 1,
        "decode context parallelism": getattr(storage_config, "dcp_size", 1) > 1,
        "pages split by heads (tp_lcm_size)": storage_config.should_split_heads,
        "LoRA (not every version's page hashes name the adapter)": args.enable_lora,
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise ConfigError(f"pdstore does not support {what} in SGLang: turn it off, or pdstore")
    if not (storage_config.extra_config or {}).get("interface_v1"):
        raise ConfigError(
            'pdstore reads and writes pages in place: add "interface_v1": 1 to'
            " --hicache-storage-backend-extra-config"
        )


def warn_of_haste(settings: Settings, args: Any) -> None:
    """Warns of a D that SGLang lets compute before P's pages are there."""
    policy = args.hicache_storage_prefetch_policy
    if settings.role == "decode" and policy != "wait_complete":
        log.warning(
            "--hicache-storage-prefetch-policy is %s: SGLang computes a prompt although its pages"
            " still come. Start the decode server with wait_complete: each of pdstore's waits has"
            " a bound",
            policy,
        )


def server_arguments() -> Any:
    """Returns the ServerArgs of this process. Raises ConfigError where SGLang does not tell."""
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"this SGLang does not tell its arguments ({error}); pdstore supports {VERSIONS}"
        ) from error
    if args is None:
        raise ConfigError("SGLang's arguments are not published in this process")
    return args


def served_model(settings: Settings, args: Any, stored_as: torch.dtype) -> ServedModel:
    """Returns the model's part of the namespace. Raises ConfigError where the user must name it.

    args: SGLang's ServerArgs.
    stored_as: the host pool's dtype, in which all kinds of fp8 are bytes.
    """
    dtype = str(stored_as).removeprefix("torch.")
    if stored_as == torch.uint8:
        dtype = _FP8.get(args.kv_cache_dtype, "")
    if not dtype:
        raise ConfigError(
            f"the KV cache is kept as bytes and --kv-cache-dtype is {args.kv_cache_dtype}: say"
            f" {' or '.join(_FP8)}, so that instances do not take one for the other; pdstore"
            " supports no other packed KV"
        )
    directory = find_checkpoint(args.model_path, args.revision)  # of a hub's name, its snapshot
    if directory is None:
        raise ConfigError(
            f"the checkpoint {args.model_path} is neither a directory nor in the hub's cache, so"
            " that its weights and its shape are not known: start SGLang with --model-path"
            " DIRECTORY"
        )
    if not settings.weights and args.load_format == "dummy":
        raise ConfigError("weights of load format dummy have no revision: set PDSTORE_WEIGHTS")
    scales = None
    if args.quantization_param_path is not None:
        scales = json.loads(Path(args.quantization_param_path).read_text())
    is_plain = args.quantization is None and scales is None
    return ServedModel(
        dtype,
        weights_revision(directory, settings),
        _rope(directory, args),
        None if is_plain else canonical([args.quantization, scales]),
    )


def _rope(directory: Path, args: Any) -> str:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model's configuration: {error}") from error
    config |= json.loads(args.json_model_override_args or "{}")
    text = config.get("text_config") or config
    fields = {name: text.get(name) for name in SHAPING}
    return shaping(fields, max_model_len=args.context_length or text.get("max_position_embeddings"))
