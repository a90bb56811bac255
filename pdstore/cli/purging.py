"""`pdstore purge`: it forgets the values of one namespace, or those that were not used for long.

In a pool of several tiers it does so in each tier that answers. If one does not, the purge of a
namespace ends with an error that names the tier, and must be run again (docs/tiers.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from pdstore.cli.answer import Answer, size
from pdstore.cli.listing import NamespaceUse, OpenPool, StoredKey, open_pool, survey
from pdstore.cli.output import age, counted, seconds_of
from pdstore.cli.progress import confirm, scanned
from pdstore.errors import ConfigError
from pdstore.format.keys import PERMANENT, BlockKey, Json, prefix_of
from pdstore.store.optional import StoredValue

_BATCH = 1000


class _Plan(NamedTuple):
    """Values that are to be forgotten.

    uses: the values to be forgotten, by namespace; their counts are 0 if the store lists nothing.
    keys: the keys of these values; None stands for all of the one namespace.
    note: what stays and why; empty if nothing has to be said.
    """

    what: str
    uses: list[NamespaceUse]
    keys: list[BlockKey] | None
    note: str = ""


def clear(
    url: str | None,
    beginning: str,
    older_than: str | None = None,
    *,
    is_rehearsal: bool,
    is_agreed: bool,
) -> Answer:
    """Clears the namespace whose hex digits begin with `beginning`; a rehearsal only counts.

    older_than: a duration such as `7d`: only values that nothing used for so long are forgotten, of
      one namespace, or of all if `beginning` is empty.
    is_agreed: False asks on the terminal first; a `no` is status 1.
    Raises ConfigError, with the namespaces' names, if not exactly one begins with these digits; if
    the store cannot list its values and `beginning` has fewer than 32 digits; and if nobody can be
    asked.
    """
    limit_s = None if older_than is None else seconds_of(older_than, "--older-than")
    if limit_s is None and not beginning:
        raise ConfigError(
            "give --namespace HEX, as `pdstore du` shows it, or --older-than DURATION"
        )
    with open_pool(url) as pool:
        if limit_s is None:
            plan = _plan_of_namespace(pool, beginning)
        else:
            plan = _plan_of_unused(pool, beginning, limit_s)
        asked = f"forget {plan.what}"
        is_done = not is_rehearsal and (is_agreed or confirm(asked, "--yes, or --dry-run to count"))
        if is_done and not is_agreed and limit_s is not None:
            plan = _plan_of_unused(pool, beginning, limit_s)  # until the answer, some may be used
        if is_done:
            _forget(pool, plan)
        label, silent = pool.store.label, list(pool.silent.values())
        lists = pool.lists is not None
    if is_rehearsal:
        line = f"would forget {plan.what} (--dry-run)"
    else:
        line = f"forgot {plan.what}" if is_done else "forgot nothing"
    document: Json = {
        "store": label,
        **_numbers_of(plan.uses, lists=lists),
        "cleared": is_done,
        "problems": [*silent],
    }
    is_refused = not is_rehearsal and not is_done
    shown = [each for each in (line, plan.note, *silent) if each]
    return Answer(document, [*shown], status=int(bool(silent) or is_refused))


def _numbers_of(uses: Sequence[NamespaceUse], *, lists: bool) -> dict[str, Json]:
    """Names namespaces and counts their values; None stands for counts if the store lists none."""
    return {
        "namespace": uses[0].hex if len(uses) == 1 else None,
        "namespaces": [use.hex for use in uses],
        "num_values": sum(use.num_values for use in uses) if lists else None,
        "bytes": sum(use.num_bytes for use in uses) if lists else None,
    }


def _plan_of_namespace(pool: OpenPool, beginning: str) -> _Plan:
    uses = survey(pool.listed_values()) if pool.lists else None
    label = pool.store.label
    use = _namespace_of(uses, beginning, "; ".join([label, *pool.silent.values()]))
    counts = f"{_counted([use])}," if pool.lists else "all"
    return _Plan(f"{counts} of {use.hex} in {label}", [use], None)


def _plan_of_unused(pool: OpenPool, beginning: str, limit_s: float) -> _Plan:
    """Plans to forget the values that were not used for longer than `limit_s`, in any tier."""
    if limit_s < pool.store.lease_s:
        raise ConfigError(
            f"--older-than is shorter than the lease of {pool.store.lease_s:g} s, in which"
            " requests still need what they have found"
        )
    by_tier = pool.values_by_tier()
    if beginning:
        label = "; ".join([pool.store.label, *pool.silent.values()])
        uses = survey(value for values in by_tier for value in values)
        beginning = _namespace_of(uses, beginning, label).hex
    listed: dict[BlockKey, list[StoredValue]] = {}
    for value in (value for values in by_tier for value in values):
        key = StoredKey.parsed(value.key)
        if key is not None and key.kind not in PERMANENT and key.namespace.startswith(beginning):
            listed.setdefault(value.key, []).append(value)
    unknown = sum(any(value.age_s is None for value in each) for each in listed.values())
    old = {key: each[0] for key, each in listed.items() if _is_unused(each, limit_s)}
    uses = survey(old.values())
    where = f"of {beginning} " if beginning else ""
    what = f"{_counted(uses)}, {where}in {pool.store.label}, unused for {age(limit_s)} and more"
    note = f"{counted(unknown, 'value')} stay: this store does not tell when they were used"
    return _Plan(what, uses, list(old), note if unknown else "")


def _is_unused(copies: Iterable[StoredValue], limit_s: float) -> bool:
    """Returns whether no tier's copy of a value was used within `limit_s`; False if one's age is
    not known.
    """
    return all(copy.age_s is not None and copy.age_s > limit_s for copy in copies)


def _counted(uses: Iterable[NamespaceUse]) -> str:
    uses = list(uses)
    number = sum(use.num_values for use in uses)
    return f"{counted(number, 'value')}, {size(sum(use.num_bytes for use in uses))}"


def _forget(pool: OpenPool, plan: _Plan) -> None:
    if plan.keys is None:
        pool.store.clear(plan.uses[0].hex)
        return
    keys = scanned(plan.keys, f"values of {pool.store.label} forgotten")
    while batch := list(islice(keys, _BATCH)):
        for tier in pool.tiers:
            if tier.label not in pool.silent:
                tier.remove(batch)


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
