"""Checks of the settings: values, their origins, and combinations that no engine can use."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ByteSize, SecretStr

from pdstore.cli.checks.finding import Finding, bad, info, warn
from pdstore.cli.quantity import size
from pdstore.settings import Settings, doubts_of, variable_of
from pdstore.store.url import StoreURL, without_secret

ENGINE_BLOCK = 16
"""Tokens of an engine's own block, unless the user says otherwise; vLLM's default."""


def set_values(settings: Settings, arguments: frozenset[str]) -> dict[str, tuple[str, str]]:
    """Returns value and origin of each setting that differs from its default, secrets masked.

    arguments: the fields that were given on the command line.
    """
    found = {}
    for name in type(settings).model_fields:
        if name not in settings.model_fields_set:
            continue
        value = getattr(settings, name)
        shown = without_secret(value) if name == "store" else str(value)
        shown = "(set)" if isinstance(value, SecretStr) else shown
        shown = size(value) if isinstance(value, ByteSize) else shown
        origin = f"--{name}" if name in arguments else "environment"
        found[variable_of(name)] = (shown, origin)
    return found


def check_settings(
    settings: Settings, arguments: frozenset[str], engine_block: int, longest: int | None = None
) -> Iterator[Finding]:
    """Yields the settings, and those that cannot work; longest: tokens of a prompt, if known."""
    for variable, (shown, origin) in set_values(settings, arguments).items():
        yield info(variable, f"{shown} ({origin})")
    if not settings.pd_transfer_via_storage:
        yield warn(
            "switch",
            "PD_TRANSFER_VIA_STORAGE is 0: an engine started from here does without pdstore",
            "export PD_TRANSFER_VIA_STORAGE=1 for P and for D",
        )
    if settings.block_tokens % engine_block:
        yield bad(
            "block size",
            f"PDSTORE_BLOCK_TOKENS={settings.block_tokens} is no multiple of the engine's"
            f" {engine_block}",
            f"set it to {max(engine_block, settings.block_tokens // engine_block * engine_block)},"
            " the same for P and D, or name the engine's block by --engine-block",
        )
    yield from (warn("settings", *doubt) for doubt in doubts_of(settings, longest))
    yield from _check_place(settings)


_OVER_TLS = {"redis": "rediss", "valkey": "valkeys"}


def _check_place(settings: Settings) -> Iterator[Finding]:
    scheme = settings.store.partition("://")[0]
    if scheme == "memory":
        yield bad(
            "place",
            "memory:// is in one process: P and D in two processes never meet there",
            "set PDSTORE_STORE to file://, shm:// or a server, the same for P and D",
        )
    name, _, kind = scheme.partition("+")
    if name in _OVER_TLS and kind != "unix" and not _is_local(settings.store):
        tls = scheme.replace(name, _OVER_TLS[name], 1)
        yield warn(
            "encryption",
            f"{scheme}:// sends KV and the password as they are, to another host",
            f"write {tls}:// (and ?ca=FILE for an authority of your own), or use a private network",
        )


def _is_local(url: str) -> bool:
    host = StoreURL.of(url).host or "localhost"
    return host in ("localhost", "::1") or host.startswith("127.")
