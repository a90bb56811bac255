"""Plots what `benchmarks.swap.bench --json` wrote: GB/s over piece size, ours and the other ways.

    python -m benchmarks.swap.plot benchmarks/results/h200_swap_bench.json docs/swap_h200.png

Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.swap.bench import SHAPES

WAYS = {
    "serving": "pdstore, serving",
    "throughput": "pdstore, throughput",
    "2 thread blocks, zero-copy": "kernel, 2 thread blocks, zero-copy",
    "a thread block per KV block": "kernel, a thread block per KV block",
    "one batch call": "one batch call",
    "memcpy per piece": "memcpy per piece",
}


def main(source: Path, target: Path) -> None:
    found = json.loads(source.read_text())
    sizes = {shape.name: shape.piece_bytes for shape in SHAPES}
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in found["rows"]:
        if row["what"] == "throughput":
            lines[row["way"]].append((sizes[row["shape"]], row["value"]))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, verb in zip(axes, ("save", "load"), strict=True):
        for way, label in WAYS.items():
            points = sorted(lines[f"{way} {verb}"])
            style = "-o" if label.startswith("pdstore") else "--."
            axis.plot([x for x, _ in points], [y for _, y in points], style, label=label)
        axis.set_xscale("log", base=2)
        axis.set_title(verb)
        axis.set_xlabel("bytes of a contiguous piece in the paged cache")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(found["title"], fontsize=9)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
