"""`pdstore doctor`: tries all that P and D need, and says for each finding what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.text import Text

from pdstore.cli.answer import Answer, busy, muted, table
from pdstore.cli.break_even import Machine, break_even
from pdstore.cli.checks.configuration import check_settings
from pdstore.cli.checks.finding import Finding, Level, info, ok, warn
from pdstore.cli.checks.host import available_memory, check_limits, check_memory, check_native
from pdstore.cli.checks.pages import MOUNTS, check_file_pages, check_pages
from pdstore.cli.checks.peer import check_peers
from pdstore.cli.checks.room import check_blocks, check_room
from pdstore.cli.checks.round_trip import RoundTrip, Speed
from pdstore.cli.model_shape import ModelShape
from pdstore.cli.open_pool import missing_pool
from pdstore.cli.quantity import duration
from pdstore.cli.selftest import layout_of
from pdstore.cli.survey import survey
from pdstore.errors import PDStoreError
from pdstore.format.namespace import Json
from pdstore.settings import Settings, read_settings
from pdstore.store import open_store
from pdstore.store.arena.store import ArenaStore
from pdstore.store.base import Store
from pdstore.store.connect import read_pool_id
from pdstore.store.file.store import FileStore
from pdstore.store.find import find_optional
from pdstore.store.optional import ListsValues
from pdstore.store.seal import seal_store

_PROMPT = 8192
_MARKS = {
    Level.OK: ("✓", "green"),
    Level.INFO: ("·", "dim"),
    Level.WARN: ("!", "yellow"),
    Level.BAD: ("✗", "red"),
}


@dataclass(frozen=True)
class Asked:
    """Options of the doctor.

    peers: URLs of P's and D's status.
    model: a config.json, for the break-even and the room; gpu: with it.
    """

    url: str | None = None
    peers: tuple[str, ...] = ()
    model: str | None = None
    machine: Machine = field(default_factory=lambda: Machine("H100"))
    engine_block: int = 16


def doctor(asked: Asked, count_gpus: Callable[[], int] | None = None) -> Answer:
    """Checks settings, host, store and peers. Status 1 if something does not work.

    Raises ConfigError for settings or a URL that cannot be used.
    """
    settings = read_settings(**({"store": asked.url} if asked.url else {}))
    shape = ModelShape.of(asked.model) if asked.model else None
    arguments = frozenset({"store"} if asked.url else ())
    longest = shape.longest_prompt if shape else None
    findings = [*check_settings(settings, arguments, asked.engine_block, longest)]
    count_gpus = count_gpus or _count_gpus
    with busy("looking at this host"):
        findings += check_host(settings, count_gpus)
    with busy("trying the store"):
        findings += _check_store(settings, shape, asked.machine, count_gpus)
    if asked.peers:
        with busy("asking P and D"):
            findings += check_peers(asked.peers)
    return _answer(findings)


def check_host(settings: Settings, count_gpus: Callable[[], int]) -> Iterator[Finding]:
    """Yields the findings about this host."""
    yield from check_memory(settings, available_memory())
    yield from check_limits(settings, count_gpus())
    yield from check_native(settings, count_gpus)


def _check_store(
    settings: Settings,
    shape: ModelShape | None,
    machine: Machine,
    count_gpus: Callable[[], int],
) -> Iterator[Finding]:
    url, missing = settings.store, missing_pool(settings.store)
    is_new = missing is not None and url.startswith("shm://")
    if is_new:  # of a name that no P opens meanwhile: a look leaves no arena behind
        url = re.sub("//[^/?]*", f"//doctor-{os.getpid()}", url, count=1)
    plain = open_store(url, settings)
    store = seal_store(plain, settings)
    if "store" not in settings.model_fields_set:
        yield info("PDSTORE_STORE", f"{plain.label} (not set: the default)")
    try:
        trip = RoundTrip(store)
        tried = list(trip.findings())
        yield from tried
        if any(finding.subject == "connect" for finding in tried):
            return
        yield from check_room(plain, shape.kv_bytes() if shape else None)
        if shape is not None:
            yield from check_blocks(store, layout_of(settings, shape))
        yield from _check_memory_pages(plain, count_gpus)
        if is_new:
            yield info("pool", f"there is no {missing} yet: the first P or D makes it")
        else:
            yield from _check_contents(plain)
        if shape is not None and trip.speed is not None:
            yield _verdict(shape, machine, trip.speed)
    finally:
        store.close()
        if is_new and isinstance(plain, ArenaStore):
            plain.path.unlink()


def _check_memory_pages(store: Store, count_gpus: Callable[[], int]) -> Iterator[Finding]:
    if isinstance(store, ArenaStore):
        yield from check_pages(store.path, MOUNTS.read_text(), count_gpus())
    if isinstance(store, FileStore):
        yield from (warn("budget", *doubt) for doubt in store.doubts)
        root = store.root.resolve()
        yield from check_file_pages(root, MOUNTS.read_text(), count_gpus())


def _check_contents(store: Store) -> Iterator[Finding]:
    try:
        pool_id, lease = read_pool_id(store).hex()[:8], store.lease_s
        yield info("pool", f"id {pool_id}, the same for P and D; lease {duration(lease)}")
        lists = find_optional(store, ListsValues)
        if lists is not None:
            names = [use.hex[:12] for use in survey(lists.stored_values())]
            yield info("namespaces", ", ".join(names[:6]) or "none yet")
    except PDStoreError as error:
        yield warn("pool", str(error), "see the findings above")


def _verdict(shape: ModelShape, machine: Machine, speed: Speed) -> Finding:
    """Returns whether this store is fast enough for this model on this GPU."""
    needed = break_even(shape, machine, _PROMPT)
    there = speed.get_bytes_per_s or 0.0
    said = (
        f"{shape.name}, {_PROMPT:,} tokens: computing takes {duration(needed.compute_s)} on"
        f" {machine.num_gpus} {machine.gpu}, reading {duration(needed.kv_bytes / there)}"
    )
    if there >= needed.bytes_per_s:
        return ok("break-even", said)
    return warn(
        "break-even",
        said,
        f"{needed.bytes_per_s / 1e9:.3g} GB/s are needed: a faster store, or more connections",
    )


def _answer(findings: list[Finding]) -> Answer:
    rows: list[list[RenderableType]] = []
    for finding in findings:
        mark, style = _MARKS[finding.level]
        said = Text(finding.said)
        if finding.remedy:
            said.append(f"\n→ {finding.remedy}", style="bold")
        rows.append([Text(mark, style=style), Text(finding.subject, style=style), said])
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    summary = f"{counts[Level.BAD]} wrong, {counts[Level.WARN]} to improve"
    document: list[Json] = [
        {"level": f.level.value, "subject": f.subject, "said": f.said, "remedy": f.remedy}
        for f in findings
    ]
    return Answer(
        {"findings": document, **{level.value: counts[level] for level in Level}},
        [table(["", "", ""], rows), muted(summary)],
        status=int(counts[Level.BAD] > 0),
    )


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
