"""`pdstore explain --request ID --log FILE`: what the logs of P and D say of one request.

The log has a request's counts and its reason, but not its tokens, so its blocks are not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from pdstore.cli.answer import Answer, table
from pdstore.cli.listing import StoredKey, open_pool
from pdstore.cli.progress import scanned
from pdstore.errors import ConfigError, PDStoreError, Reason
from pdstore.format.keys import Json, Kind
from pdstore.telemetry.reasons import ADVICE

_LINE = re.compile(
    r"request (?P<id>.+?): hand-off (?P<handoff>[0-9a-f]{32}|none),"
    r" (?P<num_tokens>[0-9]+) tokens \((?P<matched>[0-9]+) matched, (?P<loaded>[0-9]+) loaded,"
    r" (?P<computed>[0-9]+) computed, (?P<saved>[0-9]+) saved\)(?P<rest>.*)"
)
_OF_VLLM = re.compile(r"((?:chat)?cmpl-.+)-[0-9a-f]{8}")
_COUNTS = ("num_tokens", "matched", "loaded", "computed", "saved")
_REASONS = {reason.value: reason for reason in Reason}


class _Entry(NamedTuple):
    """A request's line in a log: `RequestRecord.line`."""

    file: str
    request_id: str
    handoff: str | None
    counts: Sequence[int]
    rest: str

    @property
    def client_id(self) -> str:
        """The id without the random end that each vLLM gives it: the same for P and D.

        It joins their lines where no hand-off does, as behind a proxy that relays none.
        """
        found = _OF_VLLM.fullmatch(self.request_id)
        return found[1] if found else self.request_id

    @property
    def reason(self) -> Reason | None:
        """The reason why something is missing, a word of its own between semicolons."""
        words = self.rest.split("; ")
        return next((_REASONS[word] for word in words if word in _REASONS), None)

    def as_json(self) -> Json:
        return {
            "log": self.file,
            "request_id": self.request_id,
            "handoff": self.handoff,
            **dict(zip(_COUNTS, self.counts, strict=True)),
            "reason": self.reason.value if self.reason else None,
            "line": self.rest[2:],
        }


def explain_request(url: str | None, request: str | None, logs: Sequence[str]) -> Answer:
    """Tells what P and D logged of one request. Status 1 if something was missing for it.

    request: the request's id, or a text that no other id contains. Lines of the same hand-off are
      shown, too: P and D may know the request by different ids.
    logs: the paths of logs of P and D.
    Raises ConfigError if no log has the request.
    """
    if not request:
        raise ConfigError("--log needs --request ID: what is told of a prompt comes from the pool")
    if not logs:
        raise ConfigError("--request needs --log FILE: the log of P, of D, or both (repeat it)")
    entries = _entries_of(request, logs)
    handoffs = sorted({entry.handoff for entry in entries if entry.handoff})
    markers, problems = _markers_of(url, handoffs) if handoffs else ({}, [])
    rows = [[e.file, e.request_id, *(f"{n:,}" for n in e.counts)] for e in entries]
    reasons = list(dict.fromkeys(entry.reason for entry in entries if entry.reason))
    shown: list[RenderableType] = [
        Text(f"request {entries[0].request_id}", "bold"),
        table(["log", "id", ">tokens", *(f">{name}" for name in _COUNTS[1:])], rows),
        *(f"{e.file}: {e.rest[2:]}" for e in entries if e.rest),
    ]
    shown += [f"→ {r.value}: {ADVICE[r].means}. To look at: {ADVICE[r].look_at}" for r in reasons]
    if not reasons:
        shown.append("→ nothing was missing")
    for handoff in handoffs if not problems else ():
        where = ", ".join(markers.get(handoff, ())) or "nothing any more"
        shown.append(f"→ of hand-off {handoff[:12]} the pool has {where}")
    document: Json = {
        "request": request,
        "lines": [entry.as_json() for entry in entries],
        "reasons": [reason.value for reason in reasons],
        "markers": {name: [*keys] for name, keys in markers.items()},
        "problems": [*problems],
    }
    return Answer(document, [*shown, *problems], status=int(bool(reasons)))


def _entries_of(request: str, logs: Sequence[str]) -> list[_Entry]:
    """Returns the lines of a request and of its hand-offs, in the order of the logs."""
    named = [entry for entry in _entries(logs) if request in entry.request_id]
    exact = [entry for entry in named if entry.request_id == request]
    handoffs = {entry.handoff for entry in exact or named} - {None}
    ids = {entry.request_id for entry in exact or named}
    meant = {entry.handoff or entry.request_id for entry in exact or named}
    clients = {entry.client_id for entry in exact or named}
    if not ids:
        raise ConfigError(
            f"no line of {', '.join(logs)} is of a request with {request!r} in its id; each"
            " instance logs one at INFO when the request has ended; if it bypasses the"
            " pool, it logs why in place of that, at most once a minute"
        )
    if len(clients) > 1 and len(meant) > 1:
        some = ", ".join(sorted(ids)[:4])
        raise ConfigError(f"{len(ids)} requests have {request!r} in their ids: {some}")
    return [e for e in _entries(logs) if e.request_id in ids or e.handoff in handoffs]


def _entries(logs: Sequence[str]) -> Iterator[_Entry]:
    """Yields what is a request's line in these files. Raises ConfigError for one not there."""
    for path in logs:
        for found in _matches_in(path):
            counts = [int(found[name]) for name in _COUNTS]
            handoff = None if found["handoff"] == "none" else found["handoff"]
            yield _Entry(path, found["id"], handoff, counts, found["rest"].rstrip())


def _matches_in(path: str) -> Iterator[re.Match[str]]:
    try:
        with Path(path).open(errors="replace") as file:
            lines = scanned(file, f"lines of {path}")
            candidates = (line for line in lines if ": hand-off " in line)
            yield from filter(None, map(_LINE.search, candidates))
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}") from error


def _markers_of(
    url: str | None, handoffs: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns what the pool has of hand-offs, by hand-off, and why it cannot be asked."""
    found: dict[str, list[str]] = {}
    try:
        with open_pool(url) as pool:
            for value in pool.listed_values():
                key = StoredKey.parsed(value.key)
                if key is not None and key.kind is Kind.HANDOFF and key.name in handoffs:
                    word = value.key.rpartition(":")[2]
                    said = f"`{word}` of rank {key.shard} in namespace {key.namespace[:12]}"
                    found.setdefault(key.name, []).append(said)
    except PDStoreError as error:
        return {}, [f"the pool was not asked: {error}"]
    return found, []
