"""The machine's own limit: the copies of one prompt's KV over the link, and nothing else."""

from __future__ import annotations

from statistics import median

from benchmarks.handoff.timeline import now


def measure_floor() -> dict[str, float]:
    """Returns the GB/s of one pinned copy of 256 MiB out of the first GPU and into the last."""
    import torch

    size = 256 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found = {}
    last = torch.cuda.device_count() - 1
    for name, gpu, is_out in (("out of P, GB/s", 0, True), ("into D, GB/s", last, False)):
        device = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
        times = []
        for _ in range(9):
            torch.cuda.synchronize(gpu)
            began = now()
            (host if is_out else device).copy_(device if is_out else host, non_blocking=True)
            torch.cuda.synchronize(gpu)
            times.append(now() - began)
        found[name] = size / median(times) / 1e9
    return found
