"""Settings: all settings of pdstore, from environment variables and arguments."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from pdstore.environment import (
    ADDRESS_OF_KUBERNETES,
    PREFIX,
    is_of_kubernetes,
    meant_by,
    refuse_slips,
)
from pdstore.errors import ConfigError

log = logging.getLogger(__name__)


_SWITCH = "PD_TRANSFER_VIA_STORAGE"
_OFF = ("", "0", "false", "off", "no", "n", "f")  # pydantic reads them as False
_DAY_S = 86_400.0
_MAX_TTL_S = 3650 * 86_400  # redis and the arena count shorter times than this without overflow
_MAX_BYTES = 1 << 62
MAX_LAYER_RANGES = 64
LOOKUP_TIMEOUT_S = 1.0
"""Timeout of the wait for the store's answer, for a prompt without a hand-off."""
_SHORT_TTL_S = 60
_LARGE_BLOCK = 4096  # tokens; most prompts are shorter

WaitSeconds: TypeAlias = Annotated[float, Field(ge=0, le=_DAY_S, allow_inf_nan=False)]
"""The type of a setting in seconds, where 0 means not to wait."""
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=_DAY_S, allow_inf_nan=False)]
"""The type of a setting in seconds that must be above 0."""


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE | re.ASCII)
_UNITS = ("", "k", "m", "g", "t", "p")


def parse_size(value: object, *, unit: int = 1000) -> int:
    """Returns a number of bytes: `4096`, `20GiB`, `1.5 TB`. Raises ValueError for all other text.

    unit: what `k`, `kb`, `KB` stand for: 1000, or 1024 as in Mooncake's configuration; `KiB` and
      `Ki` are 1024 bytes.
    """
    found = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
    if found is None:
        raise ValueError("write a size like 1GiB")
    power = _UNITS.index(found[2].lower())
    is_binary = bool(found[3])
    size = Fraction(found[1]) * (1024 if is_binary else unit) ** power
    if not power and (is_binary or size.denominator != 1):
        raise ValueError("write a size like 1GiB")
    if size > _MAX_BYTES:
        raise ValueError("it is more than any store holds: write a size like 1GiB")
    return int(size)


Size: TypeAlias = Annotated[ByteSize, BeforeValidator(parse_size)]
"""The type of a setting in bytes."""


class Settings(BaseSettings):
    """The settings of an instance, from environment variables and arguments; arguments win.

    Create them with `read_settings`, whose errors name the variables. `Settings()` itself raises
    pydantic's ValidationError instead.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
    )

    pd_transfer_via_storage: bool = Field(
        False,
        validation_alias=_SWITCH,
        description="1: hand KV over from prefill to decode through the pool. 0: do nothing.",
    )
    store: str = Field(
        "file://",
        repr=False,  # it may hold a password
        description="Where the pool is, the same for P and D. `file://`: a directory of this user."
        " Several URLs, separated by blanks, are tiers, the fastest first.",
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="`prefill` saves prompts, `decode` loads them and saves answers; `both`: all.",
    )
    weights: str | None = Field(
        None, description="Name of the weights' revision. Unset: a digest of the weight files."
    )
    salt: SecretStr | None = Field(
        None, description="A secret. Instances with other salts do not find this one's blocks."
    )
    seal_key_file: Path | None = Field(
        None,
        description="File of the key that encrypts values in the pool (extra `seal`). Unset: none.",
    )
    block_tokens: int = Field(
        64,
        ge=1,
        le=65536,
        description="Tokens of a stored block: a multiple of the engine's own block.",
    )
    kv_shards: int | None = Field(
        None,
        ge=1,
        description="Shards of a block. Unset: the TP size. For unequal TP: a multiple of each.",
    )
    layer_ranges: int | None = Field(
        None,
        ge=1,
        le=MAX_LAYER_RANGES,
        description="Layer ranges of a block, the same for P and D. Unset: 1 to 4, by its size.",
    )
    publish: bool = Field(
        True, description="0: this instance loads from the pool and never saves to it."
    )
    save_decoded: bool = Field(
        True, description="0: the blocks of answers are not saved for a conversation's next turn."
    )
    require_store: bool = Field(
        False,
        description="1: refuse to start without the store. 0: start, and use it once it runs.",
    )
    selftest: bool = Field(
        False, description="1: run the self-test at the start, and refuse to start if it fails."
    )
    staging: Size = Field(
        ByteSize(1 << 30),
        description="Host memory that blocks pass through, for all requests together.",
    )
    native: Literal["auto", "off", "require"] = Field(
        "auto",
        description="Block copies by the native library: `auto` if there is one, `off`, `require`.",
    )
    workers: int | None = Field(
        None,
        ge=2,
        le=64,
        description="Threads that move blocks. Unset: 4 over `shm://` and files, else 4 to 16.",
    )
    handoff_wait_s: Seconds = Field(
        10.0, description="Timeout of D's wait for P's marker; 1 s longer if the store hangs."
    )
    load: Literal["auto", "always", "never"] = Field(
        "always",
        description="KV in the pool: `always` or `never` load it, or `auto`: take the quicker way.",
    )
    on_miss: Literal["compute", "fail"] = Field(
        "compute",
        description="If a hand-off falls short: `compute` the rest, or `fail` the request.",
    )
    deadline_s: Seconds = Field(
        5.0, description="Timeout of a save or a load, to which each GB of it adds one second."
    )
    drain_s: WaitSeconds = Field(
        5.0, description="Timeout of a stop's wait for running jobs. The stop ends within 2 s more."
    )
    block_ttl_s: int = Field(
        1800,
        ge=1,
        le=_MAX_TTL_S,
        description="Life of a block after its last use, in stores that keep a clock.",
    )
    handoff_ttl_s: int = Field(
        600,
        ge=1,
        le=_MAX_TTL_S,
        description="Life of tails and hand-off markers, in stores that keep a clock.",
    )
    status_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on 127.0.0.1 of a page about this instance. 0: a free one. Unset: none.",
    )
    traces: str | None = Field(
        None,
        pattern=r"^https?://",
        repr=False,  # it may hold a password
        description="URL of an OTLP receiver: a span for each request (extra `otel`). Unset: none.",
    )

    @field_validator("status_port", mode="before")
    @classmethod
    def _forget_address(cls, value: object) -> object:
        """Ignores the address that Kubernetes puts here if a Service is called pdstore-status."""
        return None if str(value).startswith(ADDRESS_OF_KUBERNETES) else value


def setting_warnings(settings: Settings, longest_prompt: int | None) -> Iterator[tuple[str, str]]:
    """Yields why a valid setting makes the instance useless, and what to write instead.

    longest_prompt: tokens of the longest prompt that the engine takes; None if not known.
    """
    if settings.role == "decode" and settings.load == "never":
        text = "PDSTORE_LOAD=never on a decode instance: it computes each prompt that P has saved"
        yield text, "set PDSTORE_LOAD=always on D, or leave it unset"
    if settings.role == "prefill" and not settings.publish:
        text = "PDSTORE_PUBLISH=0 on a prefill instance: it saves nothing that D could load"
        yield text, "set PDSTORE_PUBLISH=1 on P, or leave it unset"
    if settings.block_ttl_s < min(_SHORT_TTL_S, settings.handoff_ttl_s):
        text = f"PDSTORE_BLOCK_TTL_S={settings.block_ttl_s}: where a store keeps a clock (redis),"
        text += " blocks may expire before D loads them"
        yield text, "set more than the longest time until D comes, or leave it unset (1800)"
    if settings.block_tokens > (longest_prompt or _LARGE_BLOCK):
        why = f"no prompt has over {longest_prompt}" if longest_prompt else "most prompts have less"
        text = f"PDSTORE_BLOCK_TOKENS={settings.block_tokens}, and {why}: prompts that fill no"
        yield f"{text} block share nothing", "set PDSTORE_BLOCK_TOKENS=64, the same for P and D"
    for field, (usual, most) in _TIMES.items():
        if (value := getattr(settings, field)) > most:
            text = f"{variable_of(field)}={value:g} is {_in_words(value)}: it is in seconds"
            yield text, f"if milliseconds were meant, write {value / 1000:g}; usual is {usual}"


_TIMES = {
    "handoff_wait_s": (10, 300),
    "deadline_s": (5, 300),
    "drain_s": (5, 300),
    "block_ttl_s": (1800, 31 * 86_400),
    "handoff_ttl_s": (600, 31 * 86_400),
}
"""The default of each setting in seconds, and a value above which milliseconds may be meant."""


def _in_words(seconds: float) -> str:
    for limit, step, unit in ((7200, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / step:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"


def origin_of(settings: Settings, field: str) -> str:
    """Returns where a field's value comes from: "environment", "argument" or "default".

    If both an argument and the variable are set, it returns "environment".
    """
    if field not in settings.model_fields_set:
        return "default"
    return "environment" if os.environ.get(variable_of(field)) else "argument"


def empty_settings(settings: Settings) -> str:
    """Returns text for a log line's end that names variables set to ""; "" if there is none."""
    unset = (variable_of(f) for f in Settings.model_fields if f not in settings.model_fields_set)
    empty = ", ".join(name for name in unset if os.environ.get(name) == "")
    return f"; empty, so as if not set: {empty}" if empty else ""


def variable_of(field: str) -> str:
    """Returns the environment variable of a field of `Settings`."""
    return _SWITCH if field == "pd_transfer_via_storage" else PREFIX + field.upper()


def read_settings(**overrides: object) -> Settings:
    """Returns the settings from `overrides` and from the environment; `overrides` win.

    An empty value counts as not set, but PDSTORE_SEAL_KEY_FILE must not be empty. Raises
    ConfigError, which names the variable: for a bad value; for an unknown PDSTORE_* variable; and
    for another PD* variable whose name looks like a misspelt setting.
    """
    refuse_slips({variable_of(field) for field in Settings.model_fields}, PREFIX)
    key_file = variable_of("seal_key_file")
    if overrides.get("seal_key_file", os.environ.get(key_file)) == "":
        raise ConfigError(
            f"bad setting: {key_file} is empty: write the path of the key file, or leave the"
            " setting out if values need not be encrypted"
        )
    try:
        return Settings(**{k: v for k, v in overrides.items() if v != ""})  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(_problem_of(e) for e in error.errors())
        raise ConfigError(f"bad setting: {problems}") from error


def read_engine_settings(**overrides: object) -> Settings:
    """Returns an engine's settings, which can stop its start only if the switch is on.

    The switch is PD_TRANSFER_VIA_STORAGE. If it is off, no other variable is read, and only a
    misspelt name of the switch raises ConfigError; one log line names the variables that are not
    read. If it is on, ConfigError is raised as by `read_settings`.
    """
    given = overrides.get("pd_transfer_via_storage", os.environ.get(_SWITCH, ""))
    if str(given).lower() not in _OFF:
        return read_settings(**overrides)
    refuse_slips({_SWITCH}, _SWITCH)
    short = {f"PD_{field.upper()}" for field in Settings.model_fields}  # with the switch's prefix
    unused = [name for name in sorted(os.environ) if name.startswith(PREFIX) or name in short]
    if unused := [name for name in unused if os.environ[name] and not is_of_kubernetes(name)]:
        is_forgotten = given == ""  # else it was switched off on purpose
        log.log(
            logging.WARNING if is_forgotten else logging.INFO,
            "%s is %s, so pdstore does nothing, whatever %s say%s: set %s=1 to use it",
            _SWITCH,
            "not set" if is_forgotten else given,
            ", ".join(unused),
            "s" if len(unused) == 1 else "",
            _SWITCH,
        )
    overrides["pd_transfer_via_storage"] = False
    return Settings.model_construct(**overrides)  # type: ignore[arg-type]


_REMEDIES = {
    "bool_parsing": "write 1 or 0",
    "float_parsing": "write a number of seconds",
    "int_parsing": "write a whole number",
    "string_pattern_mismatch": "write a URL like http://127.0.0.1:4318",
}
"""Instructions that replace those messages of pydantic that do not say what to write."""


def _problem_of(problem: ErrorDetails) -> str:
    """Returns a variable, its value if that can hold no secret, and what to write instead."""
    field = str(problem["loc"][0]) if problem["loc"] else "settings"
    shown = variable_of(field) if field in Settings.model_fields else field
    if problem["type"] == "extra_forbidden":
        fields = {variable_of(one): one for one in Settings.model_fields}
        near = meant_by(field.upper(), fields.keys()) or meant_by(
            PREFIX + field.upper(), fields.keys()
        )
        hint = f'; write "{fields[near]}"' if near else ", see docs/settings.md"
        return f"{shown}: there is no such setting{hint}"
    value = problem["input"]
    is_public = problem["loc"] and field not in ("salt", "store", "weights")
    if is_public and isinstance(value, str) and "://" not in value:
        shown += f"={value}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{shown}: {_REMEDIES.get(problem['type'], message)}"
