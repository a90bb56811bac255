"""`pdstore purge`: forgets all that a pool has of one namespace."""

from __future__ import annotations

from pdstore.cli.answer import Answer, busy
from pdstore.cli.open_pool import open_any
from pdstore.cli.quantity import counted, size
from pdstore.cli.survey import NamespaceUse, survey
from pdstore.errors import ConfigError
from pdstore.format.namespace import Json, prefix_of


def clear(url: str | None, beginning: str, *, is_rehearsal: bool) -> Answer:
    """Clears the one namespace whose hex digits begin so; a rehearsal only counts.

    Raises ConfigError if the pool has none or several, which names them; and for less than all
    digits where the store cannot list its values.
    """
    with open_any(url) as (_, store, lists):
        label = store.label
        with busy(f"listing {label}"):
            use = _only(survey(lists.stored_values()) if lists else None, beginning, label)
        if not is_rehearsal:
            with busy(f"clearing {use.hex}"):
                store.clear(use.hex)
    counts = f"{counted(use.num_values, 'value')}, {size(use.num_bytes)}," if lists else "all"
    what = f"{counts} of {use.hex} in {label}"
    line = f"would forget {what} (--dry-run)" if is_rehearsal else f"forgot {what}"
    document: Json = {
        "store": label,
        "namespace": use.hex,
        "num_values": use.num_values if lists else None,
        "bytes": use.num_bytes if lists else None,
        "cleared": not is_rehearsal,
    }
    return Answer(document, [line])


def _only(uses: list[NamespaceUse] | None, beginning: str, label: str) -> NamespaceUse:
    """Returns the one namespace that is meant. Raises ConfigError."""
    if len(beginning) == 32:
        try:
            prefix_of(beginning)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return next((use for use in uses or () if use.hex == beginning), NamespaceUse(beginning))
    if uses is None:
        raise ConfigError(
            f"{label} cannot list its namespaces: give all 32 digits, which are in the first line"
            " of P's and D's log and in pdstore_info"
        )
    meant = [use for use in uses if use.hex.startswith(beginning)]
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(use.hex for use in (meant or uses)[:8]) or "none"
    raise ConfigError(
        f"{label}: {len(meant)} namespaces begin with {beginning!r}; those there: {known}"
    )
