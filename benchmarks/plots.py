"""Draws the pictures of load, hand-offs and decisions of docs/benchmarks.md from their raw files.

    python -m benchmarks.plots

Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
AT_ONCE, TOKENS = 32, 8192


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "pdstore", "font.size": 9})
    plot_load(DOCS / "load_agent.svg")
    plot_handoff(DOCS / "handoff_exposed.svg")
    plot_decisions(DOCS / "decide.svg")


def plot_load(target: Path) -> None:
    """Draws throughput and first tokens over the jobs that arrive, for each kind of server."""
    rows = _read("h200_load_agent.json")["runs"][0]["rows"]
    rates = sorted({int(row["rate"]) for row in rows})
    labels = {"plain": "no pool", "simple": "vLLM's offload", "shm": "shm://"}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for kind, label in labels.items():
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["rate"])
        for axis, column in zip(axes, ("answers/s", "later turn p50, s"), strict=True):
            axis.plot(rates, [row[column] for row in own], "-o", label=label)
    titles = ("answers a second", "seconds to the first token of later turns, p50")
    for axis, title in zip(axes, titles, strict=True):
        _finish(axis, title, "jobs that arrive in a second", rates)
    axes[0].set(yscale="linear", ylim=(0, None))
    _save(figure, target)


def plot_handoff(target: Path) -> None:
    """Draws what a client waits for because there is a hand-off, over the prompt's length."""
    found, files = _read("h200_x2_handoff.json"), _read("h200_x2_handoff_files.json")
    measured = found["rows"] + files["rows"]
    alone = {int(n): statistics.median(s) for n, s in found["alone_prefill_s"].items()}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, store in zip(axes, ("shm", "file"), strict=True):
        axis.plot(list(alone), list(alone.values()), "k--", label="computing it again")
        for mode in ("relayed", "settled", "concurrent"):
            rows = [r for r in measured if (r["store"], r["mode"]) == (store, mode)]
            tokens = [row["tokens"] for row in rows]
            axis.plot(tokens, [row["exposed_s"] for row in rows], "-o", label=mode)
            low, high = zip(*(row["exposed_s_range"] for row in rows), strict=True)
            axis.fill_between(tokens, low, high, alpha=0.15)
        _finish(axis, f"{store}://", "tokens of the prompt", sorted(alone))
    axes[0].set_ylabel("seconds from P's answer to D's first token")
    _save(figure, target)


def plot_decisions(target: Path) -> None:
    """Draws the time to the first token over the store's rate, for each way to get the KV."""
    ways = {"load_p99_s": "always loaded", "compute_p99_s": "computed", "auto_p99_s": "auto"}
    wanted = (AT_ONCE, "in turn", TOKENS)
    found = _read("decide.json")["rows"]
    rows = [r for r in found if (r["at_once"], r["arrive"], r["tokens"]) == wanted]
    figure, axis = plt.subplots(figsize=(6, 4))
    rates = [row["gb_s"] for row in rows]
    for name, label in ways.items():
        style = "-o" if label == "auto" else "--"
        axis.plot(rates, [row[name] for row in rows], style, label=label)
    _finish(axis, f"{AT_ONCE} prompts of {TOKENS:,} tokens at once", "GB/s of the store", rates)
    axis.set_ylabel("seconds to the first token, p99")
    _save(figure, target)


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _finish(axis: Any, title: str, of_x: str, ticks: Sequence[float]) -> None:
    axis.set(xscale="log", yscale="log", title=title, xlabel=of_x)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()


def _save(figure: Any, target: Path) -> None:
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
