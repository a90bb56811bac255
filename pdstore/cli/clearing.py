"""`pdstore purge`: forgets all that a pool has of one namespace."""

from __future__ import annotations

from pdstore.cli.answer import Answer, busy
from pdstore.cli.open_pool import open_pool
from pdstore.cli.quantity import counted, size
from pdstore.cli.survey import NamespaceUse, survey
from pdstore.errors import ConfigError
from pdstore.format.namespace import Json, prefix_of


def clear(url: str | None, beginning: str, *, is_rehearsal: bool) -> Answer:
    """Clears the one namespace whose hex digits begin so; a rehearsal only counts.

    Raises ConfigError if the pool has none or several, which names them.
    """
    with open_pool(url) as pool:
        with busy(f"listing {pool.store.label}"):
            use = _only(survey(pool.lists.stored_values()), beginning, pool.store.label)
        if not is_rehearsal:
            with busy(f"clearing {use.hex}"):
                pool.store.clear(use.hex)
        label = pool.store.label
    what = f"{counted(use.num_values, 'value')}, {size(use.num_bytes)}, of {use.hex} in {label}"
    line = f"would forget {what} (--dry-run)" if is_rehearsal else f"forgot {what}"
    document: Json = {
        "store": label,
        "namespace": use.hex,
        "num_values": use.num_values,
        "bytes": use.num_bytes,
        "cleared": not is_rehearsal,
    }
    return Answer(document, [line])


def _only(uses: list[NamespaceUse], beginning: str, label: str) -> NamespaceUse:
    """Returns the one namespace that is meant. Raises ConfigError."""
    if len(beginning) == 32:
        try:
            prefix_of(beginning)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return next((use for use in uses if use.hex == beginning), NamespaceUse(beginning))
    meant = [use for use in uses if use.hex.startswith(beginning)]
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(use.hex for use in (meant or uses)[:8]) or "none"
    raise ConfigError(
        f"{label}: {len(meant)} namespaces begin with {beginning!r}; those there: {known}"
    )
