"""Measures how long staging takes to be pinned, and how long a kernel launch waits meanwhile.

    python -m benchmarks.swap.start [--json FILE]

Needs a GPU and nvcc.
"""

from __future__ import annotations

import mmap
import time
from statistics import median

import torch

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.swap.library import open_bench_library
from benchmarks.swap.rig import seconds
from pdstore.native.library import Library
from pdstore.worker.transfer.staging import PinnedMemory

_SLOT_BYTES = (2 << 20) + 4096
_GIB = 1 << 30


class _Pins:
    """Pins for the current device."""

    def __init__(self, library: Library) -> None:
        self._library, self._device = library, torch.cuda.current_device()

    def populate(self, address: int, num_bytes: int) -> None:
        self._library.populate(address, num_bytes)

    def register(self, address: int, num_bytes: int) -> None:
        self._library.register(self._device, address, num_bytes)

    def unregister(self, address: int) -> None:
        self._library.unregister(self._device, address)


def bench_start(rounds: int) -> Report:
    """Pins 1 and 8 GiB in one call, in pieces of 256 MiB and of 16 MiB."""
    pins = _Pins(open_bench_library())
    report = Report(
        f"{torch.cuda.get_device_name()}: until staging is ready; {rounds} rounds at most",
        ["GiB", "piece MiB", "ready s", "longest launch ms", "median launch ms"],
    )
    for gib in (1, 8):
        for piece_mib in (gib << 10, 256, 16):
            ready, longest, middle = [], [], []
            for _ in range(min(rounds, 3)):
                took, launches = _pin(pins, gib * _GIB, piece_mib << 20)
                ready.append(took)
                longest.append(max(launches) * 1e3)
                middle.append(median(launches) * 1e3)
            report.add(gib, piece_mib, median(ready), median(longest), median(middle))
    return report


def _pin(pins: _Pins, num_bytes: int, span_bytes: int) -> tuple[float, list[float]]:
    """Returns the seconds until all is pinned, and those of the launches meanwhile."""
    num_bytes -= num_bytes % _SLOT_BYTES
    memory = memoryview(mmap.mmap(-1, num_bytes))
    x = torch.zeros(1, device="cuda")

    def launch() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    launch()
    start = time.perf_counter()
    pinned = PinnedMemory(memory, _SLOT_BYTES, pins, span_bytes=span_bytes)
    launches = [seconds(launch)]
    while pinned.progress < 1 and time.perf_counter() < start + 60:
        launches.append(seconds(launch))
    pinned.ready(60)
    took = time.perf_counter() - start
    pinned.close()
    return took, launches


def main() -> None:
    given = parser_of(__doc__).parse_args()
    run(lambda: bench_start(given.rounds), given.json)


if __name__ == "__main__":
    main()
