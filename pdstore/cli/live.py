"""`pdstore top`: hits, misses and rates of running instances, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdstore.cli.answer import Answer, table
from pdstore.cli.metrics_page import MetricsPage
from pdstore.cli.quantity import size
from pdstore.errors import StoreUnavailable
from pdstore.format.namespace import Json

_COLUMNS = ["instance", "role", ">hit", ">asked/s", ">load", ">save", ">queued", ">slots", "misses"]


def top_once(urls: Sequence[str]) -> Answer:
    """Reads each instance once: totals since its start. Status 1 if one does not answer."""
    pages = [_read(url) for url in urls]
    documents: list[Json] = [
        {"url": url, "error": page} if isinstance(page, str) else {"url": url, **_numbers(page)}
        for url, page in zip(urls, pages, strict=True)
    ]
    rows = [_row(url, page, None) for url, page in zip(urls, pages, strict=True)]
    is_bad = any(isinstance(page, str) for page in pages)
    return Answer({"instances": documents}, [table(_COLUMNS, rows)], status=int(is_bad))


def top(urls: Sequence[str], every_s: float) -> Answer:
    """Shows a table that is made anew every `every_s` seconds, until Ctrl-C.

    Where nobody looks, in a pipe, it is shown once.
    """
    console = Console()
    if not console.is_terminal:
        return top_once(urls)
    before: list[MetricsPage | str | None] = [None] * len(urls)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                pages = [_read(url) for url in urls]
                live.update(_table(urls, pages, before), refresh=True)
                before = [*pages]
                time.sleep(every_s)
    except KeyboardInterrupt:
        return Answer({}, [])


def _table(
    urls: Sequence[str],
    pages: Sequence[MetricsPage | str],
    before: Sequence[MetricsPage | str | None],
) -> Table:
    return table(_COLUMNS, [_row(*each) for each in zip(urls, pages, before, strict=True)])


def _read(url: str) -> MetricsPage | str:
    try:
        page = MetricsPage.read(url)
    except StoreUnavailable as error:
        return str(error)
    return page if page.has("pdstore_tokens_total") else "no instance's metrics: name P or D"


def _numbers(page: MetricsPage) -> dict[str, Json]:
    return {
        "role": next(iter(page.by("pdstore_info", "role")), None),
        "tokens": dict(page.by("pdstore_tokens_total", "verb")),
        "bytes": dict(page.by("pdstore_bytes_total", "direction")),
        "misses": dict(page.by("pdstore_misses_total", "reason")),
        "drops": dict(page.by("pdstore_drops_total", "reason")),
        "queued": page.total("pdstore_queue_jobs"),
        "slots": [page.total("pdstore_slots_lent"), page.total("pdstore_slots")],
        "breaker_open": page.total("pdstore_breaker_open") > 0,
    }


def _row(
    url: str, page: MetricsPage | str, before: MetricsPage | str | None
) -> list[RenderableType]:
    """Returns a line: rates since the look before; totals at the first."""
    if isinstance(page, str):
        return [url, Text("away", "red"), *[""] * 6, page]
    past = before if isinstance(before, MetricsPage) else None
    asked, matched = (_since(page, past, "tokens", verb=verb) for verb in ("requested", "matched"))
    rates = [_rate(page, past, direction) for direction in ("load", "save")]
    seconds = page.read_s - past.read_s if past else 0.0
    state = Text("breaker open", "red") if page.total("pdstore_breaker_open") else ""
    role = next(iter(page.by("pdstore_info", "role")), "?")
    reasons = sorted(page.by("pdstore_misses_total", "reason").items(), key=lambda r: -r[1])
    misses = ", ".join(f"{reason} {number:.0f}" for reason, number in reasons[:3])
    return [
        url.removeprefix("http://"),
        state or role,
        f"{matched / asked:.0%}" if asked else "-",
        f"{asked / seconds:,.0f}" if seconds else "-",
        *rates,
        f"{page.total('pdstore_queue_jobs'):.0f}",
        f"{page.total('pdstore_slots_lent'):.0f}/{page.total('pdstore_slots'):.0f}",
        misses,
    ]


def _since(page: MetricsPage, before: MetricsPage | None, what: str, **labels: str) -> float:
    name = f"pdstore_{what}_total"
    return page.total(name, **labels) - (before.total(name, **labels) if before else 0.0)


def _rate(page: MetricsPage, before: MetricsPage | None, direction: str) -> str:
    num_bytes = _since(page, before, "bytes", direction=direction)
    if before is None:
        return size(num_bytes)
    return f"{size(num_bytes / (page.read_s - before.read_s))}/s"
