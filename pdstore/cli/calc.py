"""`pdstore calc`: KV sizes, break-even bandwidth and pool sizes, from a model's config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from pdstore.cli.answer import Answer, busy, heading, muted, table
from pdstore.cli.break_even import BreakEven, Machine, break_even
from pdstore.cli.model_shape import ModelShape
from pdstore.cli.quantity import count, duration, size
from pdstore.cli.reuse import BLOCK_TOKENS, ReuseDistances, read_trace
from pdstore.errors import ConfigError
from pdstore.format.namespace import Json

_GB = 1e9


def calc(
    config: str,
    machine: Machine,
    prompts: Sequence[int],
    *,
    kv_element_bytes: int | None = None,
    params: float | None = None,
    gb_per_s: float | None = None,
) -> Answer:
    """Computes what a token's KV takes, and the break-even for prompts of some lengths.

    params: active parameters, where the count from the configuration is not believed.
    gb_per_s: a bandwidth to give a verdict on.
    """
    shape = ModelShape.of(config)
    if params is not None:
        shape = replace(shape, active_params=params)
    kv_bytes = shape.kv_bytes(kv_element_bytes)
    found = [break_even(shape, machine, length, kv_element_bytes) for length in prompts]
    columns = [">prompt", ">KV", f">compute on {machine.num_gpus} {machine.gpu}", ">break-even"]
    if gb_per_s is not None:
        columns.append(f"at {gb_per_s:g} GB/s")
    title = (
        f"{shape.name}: {size(kv_bytes)} of KV a token, {kv_bytes * 1e6 / _GB:.3g} GB a"
        f" million; {shape.active_params / 1e9:.3g} B parameters active"
    )
    note = (
        f"one prompt alone, {machine.mfu:.0%} of the peak; reading wins above break-even,"
        " and concurrent loads share the bandwidth"
    )
    return Answer(
        _document(shape, kv_bytes, machine, found),
        [heading(title), table(columns, [_row(row, gb_per_s) for row in found]), muted(note)],
    )


def _document(
    shape: ModelShape, kv_bytes: int, machine: Machine, found: Sequence[BreakEven]
) -> dict[str, Json]:
    return {
        "model": shape.name,
        "active_params": shape.active_params,
        "kv_bytes_per_token": kv_bytes,
        "block16_bytes": 16 * kv_bytes,
        "million_tokens_bytes": 1_000_000 * kv_bytes,
        "machine": dict(machine._asdict()),
        "break_even": [dict(row._asdict()) for row in found],
    }


def pool_for(config: str, trace: str | None, hit_rate: float | None) -> Answer:
    """Computes the pool size for a hit rate on a trace, for an LRU pool. Status 1: none reaches it.

    hit_rate: None shows a range of sizes.
    """
    kv_bytes = ModelShape.of(config).kv_bytes()
    if trace is None:
        raise ConfigError("--hit-rate needs a trace: --trace FILE")
    if hit_rate is not None and not 0 < hit_rate <= 1:
        raise ConfigError("--hit-rate is a share between 0 and 1")
    with busy("reading the trace"):
        reuse = ReuseDistances(read_trace(trace))
    rates = [hit_rate] if hit_rate else [reuse.best * share for share in (0.5, 0.8, 0.95, 1.0)]
    rows: list[list[str]] = []
    sizes: list[Json] = []
    for rate in rates:
        blocks = reuse.blocks_for(rate)
        tokens = None if blocks is None else blocks * BLOCK_TOKENS
        num_bytes = None if tokens is None else tokens * kv_bytes
        sizes.append({"hit_rate": rate, "tokens": tokens, "bytes": num_bytes})
        shown = ["none" if tokens is None else count(tokens), size(num_bytes)]
        rows.append([f"{rate:.1%}", *shown])
    note = f"{count(reuse.num_blocks * BLOCK_TOKENS)} tokens asked for; a pool without end hits"
    return Answer(
        {"best_hit_rate": reuse.best, "pools": sizes},
        [table([">hit rate", ">tokens", ">pool"], rows), muted(f"{note} {reuse.best:.1%}")],
        status=int(any(blocks is None for blocks in map(reuse.blocks_for, rates))),
    )


def _row(row: BreakEven, gb_per_s: float | None) -> list[RenderableType]:
    cells: list[RenderableType] = [
        count(row.num_tokens),
        f"{row.kv_bytes / _GB:.3g} GB",
        duration(row.compute_s),
    ]
    cells.append(f"{row.bytes_per_s / _GB:.3g} GB/s")
    if gb_per_s is not None:
        wins = gb_per_s * _GB > row.bytes_per_s
        took = duration(row.kv_bytes / (gb_per_s * _GB))
        read, compute = Text(f"read, {took}", "green"), Text(f"compute (a read: {took})", "yellow")
        cells.append(read if wins else compute)
    return cells
