"""Measures block copies between a GPU and pinned slots, next to other ways to copy.

    python -m benchmarks.swap.bench [--json FILE]

Needs a GPU and, for the other ways, nvcc.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.command import parser_of, run
from benchmarks.report import Report, seconds_of
from benchmarks.swap.beside import Beside
from benchmarks.swap.library import open_bench_library
from benchmarks.swap.rig import IN, METHODS, OUT, Contiguous, Rig, SwapShape
from pdstore.errors import Direction
from pdstore.native.library import CopyPath

SHAPES = (
    SwapShape("8B", 64, 32 << 10),
    SwapShape("8B, K and V fused", 32, 64 << 10),
    SwapShape("70B TP8, 16 tokens", 160, 4 << 10),
    SwapShape("70B TP8, 64 tokens", 160, 16 << 10),
    SwapShape("MLA bf16", 61, 72 << 10),
    SwapShape("MLA fp8", 61, 41_984),
    SwapShape("one piece of 2 MiB", 1, 2 << 20),
    SwapShape("one piece of 640 KiB", 1, 640 << 10),
    SwapShape("odd pieces", 64, 32_769),
    SwapShape("256 KiB pieces", 16, 256 << 10),
)
_COMPARED = ("8B", "70B TP8, 16 tokens", "70B TP8, 64 tokens", "one piece of 2 MiB")
_BESIDE = ("8B", "8B, K and V fused", "70B TP8, 16 tokens", "MLA bf16", "MLA fp8")
_BYTES = 1 << 30  # of each timed copy
_SLOW_ROUNDS = 3  # of the other ways, some of which take a second
_SMALL = (1, 16, 64)
_GOALS = {
    (CopyPath.STAGE, OUT): 0.95,
    (CopyPath.STAGE, IN): 0.94,
    (CopyPath.STRIDED, OUT): 0.91,
    (CopyPath.STRIDED, IN): 0.91,
    (CopyPath.BATCH, OUT): 0.95,
    (CopyPath.BATCH, IN): 0.95,
}
_COLUMNS = ["what", "shape", "blocks", "way", "path", "value", "unit", "of contiguous", "goal"]


def bench_swap(rounds: int) -> Report:
    """Measures every shape both ways, and how far copies slow a running model.

    Raises ConfigError without a GPU or without the sources of the other ways.
    """
    library = open_bench_library()
    name = torch.cuda.get_device_name()
    report = Report(f"{name}: cache <-> pinned slots, medians of {rounds} in turn", _COLUMNS)
    contiguous = Contiguous(_BYTES)
    model = Beside(report.add, contiguous)
    for shape in SHAPES:
        rig = Rig(library, shape, _BYTES // shape.block_bytes)
        _measure_shape(report, rig, contiguous, rounds)
        if shape.name in _BESIDE:
            model.measure(rig, every_path=shape.name == _COMPARED[0])
        rig.close()
        del rig
        torch.cuda.empty_cache()
    return report


def _measure_shape(report: Report, rig: Rig, contiguous: Contiguous, rounds: int) -> None:
    swaps = {"serving": rig.serving, "throughput": rig.swap(CopyPath.STAGE)}
    paths = {mode: CopyPath[swap.plan()[0].path] for mode, swap in swaps.items()}
    for swap in swaps.values():
        rig.check(lambda d, s=swap: rig.native(s, d, rig.n)())  # type: ignore[misc]
    for direction in (OUT, IN):
        ways: dict[str, Callable[[], None]] = {
            mode: rig.native(swap, direction, rig.n) for mode, swap in swaps.items()
        }
        if rig.shape.name in _COMPARED:
            ways |= {m: rig.baseline(m, direction, rig.n) for m in METHODS}
        num_bytes = rig.n * rig.shape.block_bytes
        limit = contiguous.copy(direction, num_bytes)
        for way, copy in ways.items():
            path = paths.get(way)
            speed, ratio = speed_of(limit, copy, num_bytes, rounds if path else _SLOW_ROUNDS)
            goal = _goal(rig.shape, path, direction)
            name = path.name if path else ""
            row = (rig.shape.name, rig.n, f"{way} {direction.value}", name)
            report.add("throughput", *row, speed, "GB/s", ratio, goal)
        for n in _SMALL:
            _measure_small(report, rig, direction, n, rounds)
    _measure_both(report, rig, rounds)
    swaps["throughput"].close()


def _goal(shape: SwapShape, path: CopyPath | None, direction: Direction) -> float | str:
    if path is None or shape.block_bytes < 640 << 10:
        return ""
    return 0.97 if shape.num_regions == 1 and path == CopyPath.BATCH else _GOALS[path, direction]


def speed_of(
    limit: Callable[[], None], copy: Callable[[], None], num_bytes: int, rounds: int
) -> tuple[float, float]:
    """Returns the GB/s, and their share of a contiguous copy's just before."""
    copy()
    limits, times = [], []
    for _ in range(rounds):
        limits.append(seconds_of(limit))
        times.append(seconds_of(copy))
    return num_bytes / median(times) / 1e9, median(limits) / median(times)


def _measure_small(report: Report, rig: Rig, direction: Direction, n: int, rounds: int) -> None:
    copy = rig.native(rig.serving, direction, n)
    times = [seconds_of(copy) * 1e6 for _ in range(10 * rounds)]
    path = rig.serving.plan(direction)[0].path
    goal = 80 if n == 1 and rig.shape.block_bytes == 2 << 20 else ""
    row = ("submit to done", rig.shape.name, n, direction.value, path)
    report.add(*row, median(times), "us", "", goal)


def _measure_both(report: Report, rig: Rig, rounds: int) -> None:
    """Measures both directions at once, each with half of the blocks."""
    swap, half = rig.serving, rig.n // 2
    out = rig.pack(OUT, half)
    into = rig.pack(IN, half, first=half)
    times = []
    for _ in range(rounds):

        def copy() -> None:
            tickets = [swap.submit(OUT, out), swap.submit(IN, into)]
            for ticket in tickets:
                while not ticket.wait(10):
                    pass

        times.append(seconds_of(copy))
    num_bytes = 2 * half * rig.shape.block_bytes
    row = ("both directions", rig.shape.name, 2 * half, "save and load", swap.plan()[0].path)
    goal = 85 if rig.shape.name == _COMPARED[0] else ""
    report.add(*row, num_bytes / median(times) / 1e9, "GB/s", "", goal)


def main() -> None:
    given = parser_of(__doc__).parse_args()
    run(lambda: bench_swap(given.rounds), given.json)


if __name__ == "__main__":
    main()
