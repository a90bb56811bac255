"""`pdstore purge`: it forgets every value of one namespace.

In a pool of several tiers it does so in each tier that answers. If one does not, it ends with an
error that names the tier, and must be run again (docs/tiers.md).
"""

from __future__ import annotations

from pdstore.cli.answer import Answer, size
from pdstore.cli.listing import NamespaceUse, open_pool, survey
from pdstore.cli.output import counted
from pdstore.errors import ConfigError
from pdstore.format.keys import Json, prefix_of


def clear(url: str | None, beginning: str, *, is_rehearsal: bool) -> Answer:
    """Clears the namespace whose hex digits begin with `beginning`; a rehearsal only counts.

    Raises ConfigError, with the namespaces' names, if not exactly one begins with these digits.
    Raises ConfigError if the store cannot list its values and `beginning` has fewer than 32 digits.
    """
    with open_pool(url) as pool:
        label = pool.store.label
        lists = pool.lists
        uses = survey(pool.listed_values()) if lists else None
        silent = list(pool.silent.values())
        use = _namespace_of(uses, beginning, "; ".join([label, *silent]))
        if not is_rehearsal:
            pool.store.clear(use.hex)
    counts = f"{counted(use.num_values, 'value')}, {size(use.num_bytes)}," if lists else "all"
    what = f"{counts} of {use.hex} in {label}"
    line = f"would forget {what} (--dry-run)" if is_rehearsal else f"forgot {what}"
    document: Json = {
        "store": label,
        "namespace": use.hex,
        "num_values": use.num_values if lists else None,
        "bytes": use.num_bytes if lists else None,
        "cleared": not is_rehearsal,
        "problems": [*silent],
    }
    return Answer(document, [line, *silent], status=int(bool(silent)))


def _namespace_of(uses: list[NamespaceUse] | None, beginning: str, label: str) -> NamespaceUse:
    """Returns the namespace that `beginning` means. Raises ConfigError as `clear` does."""
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
    if beginning and len(meant) == 1:
        return meant[0]
    known = ", ".join(use.hex for use in (meant or uses)[:8]) or "none"
    raise ConfigError(
        f"{label}: {len(meant)} namespaces begin with {beginning!r}; those there: {known}"
    )
