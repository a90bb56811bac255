"""Timeline: what P and D do when in one hand-off, by one clock, as JSON and a picture."""

from __future__ import annotations

import functools
import importlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

now = time.perf_counter  # CLOCK_MONOTONIC: one clock for all processes of a machine

WATCHED = {
    "pdstore.scheduler.prefix_cache:PrefixCacheManager.announce": "announce",
    "pdstore.scheduler.prefix_cache:PrefixCacheManager.lookup": "lookup begins",
    "pdstore.scheduler.lookup:Lookup.finish": "lookup ends",
    "pdstore.worker.pool:KVPool.begin_save": "begin save",
    "pdstore.worker.save:OpenSave.layers_done": "layers done",
    "pdstore.worker.pool:KVPool.begin_load": "begin load",
    "pdstore.store.arena.transfer:ArenaTransfer.save": "save",
    "pdstore.store.arena.transfer:ArenaTransfer.load_window": "load",
    "pdstore.worker.transfer.staged:StagedTransfer.save": "save",
    "pdstore.worker.transfer.staged:StagedTransfer.load_window": "load",
    "pdstore.worker.mover:Mover.mark": "marker",
    "pdstore.worker.mover:Mover.num_matched": "match",
    "pdstore.worker.swap.native:NativeSwap.gather": "gather",
    "pdstore.worker.swap.native:NativeSwap.start": "start copy",
    "pdstore.worker.swap.native:NativeSwap.checksums": "sum",
    "pdstore.native.engine:Ticket.wait": "wait for copy",
    "pdstore.worker.job:Job.end_with": "job ends",
    "examples.mini_engine.model:Model.forward": "forward",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "step",
}
"""Functions by module, with what a timeline calls them."""
_MOST = 20_000


class Span(NamedTuple):
    """One call: seconds of `now()`."""

    name: str
    thread: str
    began: float
    ended: float


class Recorder:
    """Records the calls of the watched functions in this process, from `begin` on.

    Before the first `begin` nothing is wrapped, so that nothing is slowed down.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._is_installed = self._is_on = False

    def begin(self) -> None:
        if not self._is_installed:
            self._install()
        self._spans = []
        self._is_on = True

    def _install(self) -> None:
        """Wraps the watched functions, except those of packages that are not installed here."""
        self._is_installed = True
        for place, label in WATCHED.items():
            module_name, _, path = place.partition(":")
            owner_name, _, function_name = path.partition(".")
            try:
                owner = getattr(importlib.import_module(module_name), owner_name)
            except ImportError:
                continue
            setattr(owner, function_name, self._watched(getattr(owner, function_name), label))

    def take(self) -> list[Span]:
        """Stops, and returns what was recorded."""
        self._is_on = False
        return self._spans[:_MOST]

    def _watched(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return function(*args, **kwargs)
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append(Span(label, threading.current_thread().name, began, now()))

        return call


def write_timeline(path: Path, marks: dict[str, float], spans: dict[str, list[Span]]) -> None:
    """Writes `path` (JSON, seconds from the first mark) and beside it the same as SVG.

    marks: what the client saw, by name. spans: those of each instance.
    """
    zero = min(marks.values())
    told = {
        "marks": {name: at - zero for name, at in marks.items()},
        "spans": {
            instance: [[s.name, s.thread, s.began - zero, s.ended - zero] for s in of_one]
            for instance, of_one in spans.items()
        },
    }
    path.write_text(json.dumps(told))
    path.with_suffix(".svg").write_text(_svg(told))


_COLOURS = {
    **{"forward": "#c9d6e8", "step": "#c9d6e8", "save": "#f2c28b", "load": "#a8d5a2"},
    **{"gather": "#d9822b", "wait for copy": "#3d8b37", "sum": "#8e6fb0", "marker": "#c23b3b"},
    **{"match": "#777777", "start copy": "#1f5c1a"},
}


def _svg(told: dict[str, Any]) -> str:
    width, row, left = 1400, 14, 190
    marks, spans = told["marks"], told["spans"]
    end = max([*marks.values(), *(s[3] for of_one in spans.values() for s in of_one)])
    begin = min(0.0, *(s[2] for of_one in spans.values() for s in of_one))
    scale = (width - left - 20) / max(end - begin, 1e-9)
    parts: list[str] = []
    y = 40
    for instance, of_one in spans.items():
        for thread in dict.fromkeys(span[1] for span in of_one):
            y += row
            name = f"{instance} {thread.removeprefix('pdstore-')}"
            parts.append(f'<text x="4" y="{y + 10}">{name}</text>')
            for label, its_thread, began, ended in of_one:
                if its_thread == thread:
                    parts.append(
                        _bar(label, left + (began - begin) * scale, y, (ended - began) * scale)
                    )
        y += row
    for i, (name, at) in enumerate(marks.items()):
        x = left + (at - begin) * scale
        parts.append(f'<line x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{y}" stroke="#c00"/>')
        parts.append(f'<text x="{x + 2:.1f}" y="{12 + i % 3 * 11}">{name} {at * 1e3:.1f} ms</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 20}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="10">', *parts, "</svg>"])


def _bar(label: str, x: float, y: float, width: float) -> str:
    colour = _COLOURS.get(label, "#444")
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.6):.1f}" height="11" fill="{colour}"'
        f' fill-opacity="0.75"><title>{label}</title></rect>'
    )
