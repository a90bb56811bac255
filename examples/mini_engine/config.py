"""Config: the options of one engine process, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pdstore import ConfigError, Settings, check_store, read_engine_settings


def positive(text: str) -> int:
    """Returns an option's number. Raises ArgumentTypeError below 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def _option(default: Any, help: str, **more: Any) -> Any:  # noqa: ANN401 - any type of field
    return field(default=default, metadata={"help": help, "default": default, **more})


_OF_PAGE = ("127.0.0.1", "localhost", "0.0.0.0", "::")  # noqa: S104
"""Addresses that an API and the status page, which is on 127.0.0.1, cannot both have."""


@dataclass(frozen=True)
class Config:
    """The options of one engine process. `settings` are pdstore's: the switch, role and store."""

    model: Path
    settings: Settings
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on", type=int)
    num_blocks: int = _option(2048, "blocks of the KV cache", type=positive)
    block_size: int = _option(16, "tokens of a block", type=positive)
    max_num_seqs: int = _option(16, "requests in a step", type=positive)
    max_num_batched_tokens: int = _option(
        512, "tokens in a step: the chunk of a long prompt", type=positive
    )
    max_model_len: int | None = _option(
        None,
        "most tokens of a prompt with its answer; default: the model's own limit",
        type=positive,
    )
    device: str = _option("cpu", "cpu, cuda or cuda:N")
    dtype: str = _option("float32", "of weights and KV", choices=("float32", "bfloat16", "float16"))
    kv_cache_dtype: str = _option(
        "auto",
        "of KV: that of --dtype, or int8 with a scale for each token and head",
        choices=("auto", "int8"),
    )
    served_model_name: str | None = _option(None, "what clients call it; default: its path")
    threads: int = _option(1, "CPU threads that compute", type=positive)
    state: bool = _option(
        False,
        "add a layer with one state for all of a prefix, as hybrids have",
        action="store_true",
    )
    max_jobs: int = _option(1024, "saves, and loads, that wait for pdstore", type=positive)

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ConfigError(f"--model {self.model}: no checkpoint there (no config.json)")
        is_used = self.settings.pd_transfer_via_storage and self.port
        if is_used and self.host in _OF_PAGE and self.port == self.settings.status_port:
            raise ConfigError(
                f"PDSTORE_STATUS_PORT={self.port} and --port {self.port} are one port: the status"
                " page needs a port of its own"
            )

    @property
    def is_quantized(self) -> bool:
        """True if the KV cache has numbers of int8, and scales."""
        return self.kv_cache_dtype == "int8"

    @property
    def name(self) -> str:
        """The name that clients use for the model."""
        return self.served_model_name or str(self.model)


def parse(argv: Sequence[str] | None = None) -> Config:
    """Returns the config of a command line.

    Raises ConfigError for a value that pdstore refuses; argparse exits with 2 for a bad option.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.mini_engine",
        description="Serves a Hugging Face decoder over OpenAI's completions API, greedily. With"
        " PD_TRANSFER_VIA_STORAGE=1 in the environment, KV goes from P to D through the pool.",
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--role", help="prefill, decode or both; default: PDSTORE_ROLE, or both")
    parser.add_argument("--store", help="URL of the pool, equal on P and D; default: PDSTORE_STORE")
    for option in fields(Config):
        if option.metadata:
            metadata = dict(option.metadata)
            if option.default is not None:
                metadata["help"] += " (%(default)s)"
            parser.add_argument("--" + option.name.replace("_", "-"), **metadata)
    values = vars(parser.parse_args(argv))
    given = {name: values.pop(name) for name in ("role", "store")}
    settings = read_engine_settings(**{k: value for k, value in given.items() if value is not None})
    if settings.pd_transfer_via_storage:
        check_store(settings)
    return Config(settings=settings, **values)
