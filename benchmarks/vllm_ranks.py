"""Functions that an instance's ranks are asked to call, each in its worker's process.

vLLM sends these functions by their names: its workers import this module.
"""

from __future__ import annotations

import hashlib
from typing import Any


def digest_of_weights(worker: Any) -> str:
    import torch

    model = getattr(worker, "worker", worker).model_runner.model
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        bits = weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])
        digest.update(f"{name} {int(bits.sum(dtype=torch.int64))}\n".encode())
    return digest.hexdigest()[:16]


def worker_counters(worker: Any) -> dict[str, float]:
    """Returns the counters of the connector's worker side."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return counters_of(get_kv_transfer_group()) if has_kv_transfer_group() else {}


def counters_of(connector: Any) -> dict[str, float]:
    """Returns the counters of pdstore's half; none for another connector, or without one."""
    found: dict[str, float] = {}
    registry = getattr(getattr(connector, "metrics", None), "registry", None)
    for metric in registry.collect() if registry else ():
        for sample in metric.samples:
            if sample.name.endswith(("_total", "_sum", "_count")):
                labels = ",".join(sample.labels.values())
                name = f"{sample.name.removeprefix('pdstore_')}:{labels}"
                found[name] = found.get(name, 0.0) + sample.value
    return found
