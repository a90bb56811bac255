"""log_start: says in the log with what a pool starts."""

from __future__ import annotations

import logging

from pdstore.format.namespace import Namespace
from pdstore.outcome import Direction
from pdstore.settings import Settings, empty_settings
from pdstore.store.base import Store
from pdstore.worker.movers import Mover
from pdstore.worker.swap.base import Swap

log = logging.getLogger(__name__)


def log_start(
    settings: Settings, namespace: Namespace, store: Store, swap: Swap, mover: Mover
) -> None:
    """Logs all that an operator compares between two instances in one line, and the copies' paths.

    Memory is the host's that values are copied through.
    """
    out, back = swap.plan(Direction.SAVE), swap.plan(Direction.LOAD)
    log.info(
        "pool %s, namespace %s, role %s, block copies by %s, %d MiB of host memory, %d workers%s",
        store.label,
        namespace.hex,
        settings.role,
        ", ".join(sorted({plan.path for plan in out + back})),
        mover.memory_bytes >> 20,
        settings.workers,
        empty_settings(settings),
    )
    for one, other in zip(out, back, strict=True):
        paths = one.path if one.path == other.path else f"{one.path} to the host, {other.path} back"
        log.info("%s, %d tokens: %s, %s", one.part, one.num_tokens, paths, one.why)
