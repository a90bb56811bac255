"""Which instances a run has: one alone, and a P and a D for each store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.handoff.instance import Instance
from benchmarks.handoff.mini import VOCABULARY, MiniInstance


class Setup:
    """The instances of one run, of the mini engine.

    scratch: for the checkpoint and the logs.
    """

    def __init__(self, scratch: Path, given: argparse.Namespace) -> None:
        self._scratch, self._given = scratch, given
        (scratch / "logs").mkdir(exist_ok=True)
        self.instances: list[Instance] = []
        self.pairs: dict[str, tuple[Instance, Instance]] = {}
        self.prepare()

    def prepare(self) -> None:
        """Makes the checkpoint that all instances serve."""
        from benchmarks.checkpoint import Shape, make_model

        given = self._given
        self._model = self._scratch / "model"
        shape = Shape(VOCABULARY, given.layers, given.hidden, max(given.tokens) + 128)
        make_model(shape, self._model, "cpu" if given.cpu else "cuda:0", self._dtype)

    def start_alone(self) -> None:
        """The instance without a pool, on the first GPU."""
        self.alone = self._start("alone", {}, 0)

    def start_pair(self, store: str, url: str) -> None:
        """P on the first GPU, D on the second if there is one."""
        common = {"store": url, "weights": "bench", "save_deadline_s": 60, "load_deadline_s": 60}
        self.pairs[store] = (
            self._start(f"{store}-p", common | {"role": "prefill"}, 0),
            self._start(f"{store}-d", common | {"role": "decode"}, 1),
        )

    def ready(self) -> dict[str, Any]:
        """Waits for all; what they say of themselves."""
        return {each.name: each.ready(400) for each in self.instances}

    def stop(self) -> None:
        for each in self.instances:
            each.stop()

    @property
    def _dtype(self) -> str:
        return "float32" if self._given.cpu else "bfloat16"

    def _start(self, name: str, settings: dict[str, Any], gpu: int) -> Instance:
        import torch

        given = self._given
        gpus = 0 if given.cpu else torch.cuda.device_count()
        arguments = {
            "model": str(self._model),
            "settings": settings,
            "device": "cpu" if given.cpu else f"cuda:{min(gpu, gpus - 1)}",
            "dtype": self._dtype,
            "chunk": given.chunk,
            "num_tokens": max(given.tokens),
            "max_seqs": max(2, given.burst * given.burst_tokens // max(given.tokens) + 1),
        }
        log = self._scratch / "logs" / f"{name}.log"
        instance = Instance(name, MiniInstance, arguments, dict(os.environ), log)
        self.instances.append(instance)
        return instance


ENGINES: dict[str, Callable[[Path, argparse.Namespace], Setup]] = {"mini": Setup}
