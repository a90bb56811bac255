"""Block copies under other sizes than the defaults: which slices, lanes and batches are best.

    python -m benchmarks.swap.sweep --json FILE

Needs a GPU and nvcc. A copy is of 1 GiB; every number is a median, next to a contiguous copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.swap.bench import SHAPES, speed_of
from benchmarks.swap.beside import keep_busy, pump, readback
from benchmarks.swap.library import open_bench_library
from benchmarks.swap.rig import IN, OUT, Contiguous, Rig, seconds
from pdstore.native.library import CopyPath

MIB = 1 << 20
COPIES: dict[str, dict[str, int]] = {
    "default": {},
    "8 both ways": {"copy_out_bytes": 8 * MIB, "copy_in_bytes": 8 * MIB},
    "10 and 64": {"copy_out_bytes": 10 * MIB, "copy_in_bytes": 64 * MIB},
    "16 and 16": {"copy_out_bytes": 16 * MIB, "copy_in_bytes": 16 * MIB},
}
STAGES: dict[str, dict[str, int]] = {
    "default": {},
    "12": {"stage_out_bytes": 12 * MIB, "stage_in_bytes": 16 * MIB},
}
TRIED = {
    "8B": CopyPath.STRIDED,
    "8B, K and V fused": CopyPath.BATCH,
    "MLA bf16": CopyPath.BATCH,
    "one piece of 2 MiB": CopyPath.BATCH,
    "one piece of 640 KiB": CopyPath.BATCH,
    "70B TP8, 16 tokens": CopyPath.STAGE,
}
COLUMNS = ["shape", "path", "sizes", "what", "value", "unit", "of contiguous"]


def main() -> None:
    given = parser_of(__doc__, rounds=7).parse_args()
    run(lambda: bench_sweep(given.rounds), given.json)


def bench_sweep(rounds: int) -> Report:
    """Measures the shapes of `TRIED`."""
    library = open_bench_library()
    contiguous = Contiguous(1 << 30)
    report = Report(f"sizes in MiB, medians of {rounds} in turn", COLUMNS)
    for shape in SHAPES:
        if shape.name in TRIED:
            rig = Rig(library, shape, (1 << 30) // shape.block_bytes)
            sweep(report, rig, TRIED[shape.name], contiguous, rounds)
            rig.close()
    return report


def sweep(report: Report, rig: Rig, path: CopyPath, contiguous: Contiguous, rounds: int) -> None:
    """Measures every choice of sizes for one shape."""
    num_bytes = rig.n * rig.shape.block_bytes
    for sizes, options in (STAGES if path is CopyPath.STAGE else COPIES).items():
        swap = rig.swap(path, sizes=options)

        def add(what: str, *cells: object, row: str = sizes) -> None:
            value, unit, ratio = cells
            report.add(rig.shape.name, path.name, row, what, value, unit, ratio)  # type: ignore[arg-type]

        def add_beside(what: str, *cells: object) -> None:
            _, _, way, speed, value, unit, *_ = cells
            add(f"{what}, {way}", value, unit, str(speed))

        for direction in (OUT, IN):
            limit = contiguous.copy(direction, num_bytes)
            copy = rig.native(swap, direction, rig.n)
            speed, ratio = speed_of(limit, copy, num_bytes, rounds)
            add(direction.value, speed, "GB/s", ratio)
            add(f"64 {direction.value}", *small(rig.native(swap, direction, 64), limit))
            pump(add_beside, rig, swap, path, direction)
        readback(add_beside, rig, keep_busy(rig, swap, OUT), path, OUT)
        swap.close()


def small(copy: Callable[[], None], limit: Callable[[], None]) -> tuple[float, str, str]:
    """Returns the microseconds of a small copy right after another, and after 20 ms of rest."""
    warm = median(seconds(copy) for _ in range(20)) * 1e6
    cold = []
    for _ in range(9):
        limit()
        time.sleep(0.02)
        cold.append(seconds(copy) * 1e6)
    return warm, "us", f"cold {median(cold):.0f}"


if __name__ == "__main__":
    main()
