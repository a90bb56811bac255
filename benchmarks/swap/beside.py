"""Measures how block copies slow a running model and its small copies, and their CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

from benchmarks.report import seconds_of
from benchmarks.swap.rig import IN, OUT, Contiguous, Rig
from pdstore.errors import Direction
from pdstore.native.library import CopyPath
from pdstore.threads import Worker
from pdstore.worker.swap.native import NativeSwap, Packed

Add = Callable[..., None]
_PROBES = 300
_SECONDS = 0.2  # of each measured point
_TURNS = 3
_AHEAD = 4  # calls that are queued at once, as an engine's steps are


class Background:
    """Repeats a copy on a thread until `stop`, and counts the copies."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy, self._stopped = copy, False
        self.count = 0
        self._until = time.monotonic() + 30  # a bound, should `stop` be starved
        self._worker = Worker("pdstore-bench", self._take)

    def stop(self) -> None:
        self._stopped = True
        self._worker.join(30)

    def run(self) -> None:
        self._copy()
        self.count += 1

    def fail(self, error: Exception) -> None:
        self._stopped = True

    def _take(self) -> Background | None:
        return None if self._stopped or time.monotonic() > self._until else self


class Beside:
    """A model's steps on this GPU, to run beside copies; adds rows about both."""

    def __init__(self, add: Add, contiguous: Contiguous) -> None:
        self._add, self._contiguous = add, contiguous
        self._works = {"decode graph": decode(), "prefill graph": prefill(), "8k GEMM": gemm()}

    def measure(self, rig: Rig, *, every_path: bool) -> None:
        """Measures one rig's shape: the path that serving takes, or every path and way to copy."""
        chosen = [CopyPath[rig.serving.plan()[0].path]]
        paths = [CopyPath.STRIDED, CopyPath.BATCH, CopyPath.STAGE] if every_path else chosen
        swaps = {path: rig.swap(path) for path in paths}
        for direction in (OUT, IN):
            ways = {p.name: keep_busy(rig, s, direction) for p, s in swaps.items()}
            for what, work in self._works.items():
                others = self._others(rig, direction, what) if every_path else {}
                for way, copy in {**ways, **others}.items():
                    self._slows(rig, direction, what, work, way, copy)
            for path, swap in swaps.items():
                readback(self._add, rig, ways[path.name], path, direction)
                pump(self._add, rig, swap, path, direction)
        for swap in swaps.values():
            swap.close()
        if every_path:
            caller(self._add, rig)

    def _others(self, rig: Rig, direction: Direction, what: str) -> dict[str, Callable[[], None]]:
        others = {"contiguous memcpy": self._contiguous.copy(direction, _bytes_of(rig))}
        if what == "decode graph":
            for name in ("a thread block per KV block", "2 thread blocks, zero-copy"):
                others[name] = rig.baseline(name, direction, rig.n)
        return others

    def _slows(
        self,
        rig: Rig,
        direction: Direction,
        what: str,
        work: Callable[[], None],
        way: str,
        copy: Callable[[], None],
    ) -> None:
        slower, speed = beside(work, copy, _bytes_of(rig))
        row = (rig.shape.name, rig.n, f"{way} {direction.value}", f"{speed:.1f} GB/s")
        self._add(f"slows {what}", *row, slower, "%", "", goal_of(what, way, direction))


def _bytes_of(rig: Rig) -> int:
    return rig.n * rig.shape.block_bytes


def keep_busy(rig: Rig, swap: NativeSwap, direction: Direction) -> Callable[[], None]:
    """Returns a call that copies without a gap: the next copy is queued while one runs."""
    packed, queued = rig.pack(direction, rig.n), []

    def copy() -> None:
        queued.append(swap.submit(direction, packed))
        while len(queued) > 1 and not queued[0].wait(10):
            pass
        if len(queued) > 1:
            queued.pop(0)

    return copy


def goal_of(what: str, way: str, direction: Direction) -> object:
    if way not in CopyPath.__members__:
        return ""
    if way == "STAGE":
        return {OUT: 4, IN: 7}[direction] if what == "decode graph" else ""
    if what == "decode graph":
        return 1.5 if direction is OUT else "memcpy + 1"
    return 2


def beside(
    work: Callable[[], None], copy: Callable[[], None], num_bytes: int
) -> tuple[float, float]:
    """Returns by how many percent the copy slows the work, and the copy's GB/s meanwhile."""
    alone, during, speeds = [pace(work)], [], []
    for _ in range(_TURNS):
        background = Background(copy)
        pace(work, 0.05)
        count, start = background.count, time.monotonic()
        during.append(pace(work))
        speeds.append((background.count - count) * num_bytes / (time.monotonic() - start) / 1e9)
        background.stop()
        torch.cuda.synchronize()
        alone.append(pace(work))
    return 100 * (median(during) / median(alone) - 1), median(speeds)


def pace(work: Callable[[], None], for_s: float = _SECONDS) -> float:
    """Returns the seconds of a call, by the device's clock."""
    work()
    torch.cuda.current_stream().synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def once() -> None:
        work()
        torch.cuda.current_stream().synchronize()

    one = max(seconds_of(once), 1e-4)
    calls = max(3, int(for_s / one))
    begin.record()
    queued: list[torch.cuda.Event] = []
    for _ in range(calls):
        work()
        queued.append(torch.cuda.current_stream().record_event())
        if len(queued) > _AHEAD:
            queued.pop(0).synchronize()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def readback(
    add: Add, rig: Rig, copy: Callable[[], None], path: CopyPath, direction: Direction
) -> None:
    """Measures a 4 KiB copy to the host on another stream, as an engine copies its tokens."""
    device = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    host = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def probe() -> None:
        with torch.cuda.stream(stream):
            host.copy_(device, non_blocking=True)
        stream.synchronize()

    background = Background(copy)
    while background.count < 2:
        time.sleep(0.001)
    times = sorted(seconds_of(probe) * 1e3 for _ in range(_PROBES))
    late = times[_PROBES * 99 // 100]
    background.stop()
    goal = "" if direction is IN else (0.7 if path is CopyPath.STAGE else 0.5)
    row = (rig.shape.name, rig.n, direction.value, path.name)
    add("longest 4 KiB readback", *row, times[-1], "ms", "", goal)
    add("99th of 100 4 KiB readbacks", *row, late, "ms", "", "")
    add("median 4 KiB readback", *row, median(times), "ms", "", "")


def pump(add: Add, rig: Rig, swap: NativeSwap, path: CopyPath, direction: Direction) -> None:
    """Measures the CPU time of the copy engine's thread at full rate."""
    background = Background(keep_busy(rig, swap, direction))
    while background.count < 2:
        time.sleep(0.001)
    thread = "pdstore-out" if direction is OUT else "pdstore-in"
    first, count, start = cpu_s_of(thread), background.count, time.monotonic()
    time.sleep(_SECONDS)
    last, more, end = cpu_s_of(thread), background.count - count, time.monotonic()
    background.stop()
    busy = 100 * (last - first) / (end - start)
    speed = more * rig.n * rig.shape.block_bytes / (end - start) / 1e9
    row = (rig.shape.name, rig.n, direction.value, f"{path.name}, {speed:.1f} GB/s")
    add("CPU of the pump", *row, busy, "% of a core", "", 50 if path is CopyPath.BATCH else 15)


def cpu_s_of(name: str) -> float:
    """Returns the CPU time of this process's threads of one name."""
    tasks = [
        t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text() == f"{name}\n"
    ]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def caller(add: Add, rig: Rig) -> None:
    """Adds the calling thread's time: in the engine's call, and in packing the pieces before it."""
    n = 1024  # the same blocks twice, if there are not as many
    pieces = [rig.piece(i % rig.n) for i in range(n)]
    packing = median(seconds_of(lambda: rig.serving.pack(OUT, pieces)) * 1e6 for _ in range(9))
    packed = rig.serving.pack(OUT, pieces)
    times = [submit_us(rig.serving, packed) for _ in range(9)]
    row = (rig.shape.name, n, "save", "")
    add("caller, engine's call", *row, median(times), "us", "", 50)
    add("caller, packing in Python", *row, packing, "us", "", "")


def submit_us(swap: NativeSwap, packed: Packed) -> float:
    start = time.perf_counter()
    ticket = swap.submit(OUT, packed)
    took = (time.perf_counter() - start) * 1e6
    while not ticket.wait(10):
        pass
    return took


def decode() -> Callable[[], None]:
    """Returns a graph of a decode step: sixteen 64 x 8192 x 8192 products, each with a norm."""
    weights = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for weight in weights:
            y = functional.rms_norm(y @ weight, (8192,))

    return captured(step)


def prefill() -> Callable[[], None]:
    """Returns a graph of a prefill: four layers of an 8B model on 2,048 tokens."""
    sizes = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    layers = [
        [torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.01 for size in sizes]
        for _ in range(4)
    ]
    x = torch.randn(1, 2048, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for qkv, out, up, down in layers:
            mixed = functional.rms_norm(y, (4096,)) @ qkv
            heads = mixed.view(1, 2048, 48, 128).transpose(1, 2)
            q, k, v = heads[:, :32], heads[:, 32:40], heads[:, 40:]
            k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y + mixed.transpose(1, 2).reshape(1, 2048, 4096) @ out
            gate, value = (functional.rms_norm(y, (4096,)) @ up).chunk(2, -1)
            y = y + (functional.silu(gate) * value) @ down

    return captured(step)


def gemm() -> Callable[[], None]:
    """One 8192 x 8192 x 8192 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.matmul(a, b, out=out)

    return product


def captured(step: Callable[[], None]) -> Callable[[], None]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    keep = step, graph  # a replay reads the step's tensors, and does not hold them

    def replay() -> None:
        keep[1].replay()

    return replay
