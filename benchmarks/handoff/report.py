"""The rows of a run, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.handoff.measure import MODES, Sample

HEAD = f"{'store':10} {'mode':10} {'tokens':>7} {'exposed, ms':>12} {'range':>16} {'ttft':>8}"
_EXPOSED = "exposed: from P's answer to D's first token, less a decode step; so it may be below 0"


def rows_of(samples: list[Sample]) -> list[dict[str, Any]]:
    """Returns a row for each length, store and mode: medians, with ranges."""
    kinds = sorted({(s.store, s.mode, s.tokens) for s in samples}, key=_place)
    return [_row([s for s in samples if (s.store, s.mode, s.tokens) == kind]) for kind in kinds]


def _place(kind: tuple[str, str, int]) -> tuple[int, str, int]:
    store, mode, tokens = kind
    return tokens, store, MODES.index(mode)


def _row(samples: list[Sample]) -> dict[str, Any]:
    one = samples[0]
    row: dict[str, Any] = {"store": one.store, "mode": one.mode, "tokens": one.tokens}
    for name in ("exposed_s", "ttft_s", "prefill_s"):
        values = [getattr(s, name) for s in samples]
        row |= {name: median(values), f"{name}_range": [min(values), max(values)]}
    saved = [s.saved_s for s in samples if s.saved_s is not None]
    return row | {
        "d_computed": max(s.d_computed for s in samples),
        "saved_s": median(saved) if saved else None,
        "samples": len(samples),
        "reasons": sorted({s.reason for s in samples if s.reason}),
    }


def table(found: dict[str, Any]) -> str:
    """Returns the rows, the lone instance, the bursts and the floor for people, in ms."""
    head = HEAD + "  prefill  stored  D computes"
    return "\n".join([head, *_lines(found), _EXPOSED])


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from map(_line, found["rows"])
    for tokens, took in found["alone_prefill_s"].items():
        line = (
            f"prefill of {tokens} tokens by an instance without a pool: {median(took) * 1e3:.1f} ms"
        )
        if like := found["control_prefill_s"].get(tokens):
            line += f", by a second one {median(like) * 1e3:.1f}"
        yield line
    for name in dict.fromkeys(burst["store"] for burst in found["bursts"]):
        of_store = [burst for burst in found["bursts"] if burst["store"] == name]
        handed = median(t for burst in of_store for t in burst["ttft_s"])
        alone = median(t for burst in of_store for t in burst["alone_ttft_s"])
        yield f"{name}: a burst's median first token {handed * 1e3:.1f} ms; alone {alone * 1e3:.1f}"
    for lead in found.get("leads", []):
        said = ", ".join(f"{seconds * 1e3:.1f}" for seconds in lead["lead_s"])
        yield f"{lead['store']}: a concurrent D's load began before P's `done` by {said} ms"
    for name, value in found.get("floor", {}).items():
        yield f"floor: {name} {value:.1f}"


def _line(row: dict[str, Any]) -> str:
    low, high = row["exposed_s_range"]
    saved = "" if row["saved_s"] is None else f"{row['saved_s'] * 1e3:.1f}"
    return (
        f"{row['store']:10} {row['mode']:10} {row['tokens']:7} {row['exposed_s'] * 1e3:12.1f}"
        f" {low * 1e3:6.1f}..{high * 1e3:<8.1f} {row['ttft_s'] * 1e3:8.1f}"
        f" {row['prefill_s'] * 1e3:8.1f} {saved:>7} {row['d_computed']:11}"
        f"  {', '.join(row['reasons'])}"
    )


def late_stores(leads: list[dict[str, Any]]) -> list[str]:
    """Returns the stores over which no load began before P's `done`: nothing was followed."""
    return [lead["store"] for lead in leads if max(lead["lead_s"]) <= 0]
