"""The command `pdstore size`: prints a model's sizes, or where tiers pay.

With the config.json of a model it prints the size of its KV and the bandwidth above which loading
it beats computing it. Without one it prints for published models and for disks of several rates
whether a tier on that disk pays. See docs/sizing.md.

T_c is the time to compute a prompt of p tokens, B* the bandwidth, N the active parameters:
T_c = F(p) / (GPUs * peak * MFU)      F(p) = 2 * N * p + layers * heads * (d_qk + d_v) * p^2
B*  = (p * (KV bytes of a token) + (bytes of the states)) / T_c
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from pdstore.errors import ConfigError
from pdstore.sizing.break_even import (
    DEFAULT_MFU,
    DISK_RATES,
    KNOWN_MODELS,
    MARGIN,
    PEAK_TFLOPS,
    Machine,
    break_even,
    verdict_of,
)
from pdstore.sizing.shape import ModelShape

_GB = 1e9
_PROMPTS = (1024, 8192, 32_768, 131_072)
"""Tokens of the prompts in the printed table, unless the user names prompts."""
_TIER_PROMPT = 8192
"""And of the prompt in the table of tiers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the sizes that the arguments ask for. Returns 0, or 2 for a wrong argument."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.config is None:
            return _print_tiers(asked)
        shape = ModelShape.of_config(asked.config)
        if asked.params:
            shape = replace(shape, active_params=asked.params)
        return _print_break_even(shape, asked)
    except ConfigError as error:
        print(f"pdstore size: {error}", file=sys.stderr)
        return 2


def _print_break_even(shape: ModelShape, asked: argparse.Namespace) -> int:
    """Prints, for each prompt, the bandwidth above which reading is faster than computing."""
    machine = Machine(asked.gpu, asked.gpus, asked.mfu, asked.tokens_per_s)
    element_bytes = asked.kv_element_bytes
    kv_bytes = shape.kv_bytes(element_bytes)
    prompts = asked.prompt or _PROMPTS
    rows = [break_even(shape, machine, length, element_bytes) for length in prompts]
    if asked.json:
        document = {
            "model": shape.name,
            "active_params": shape.active_params,
            "kv_bytes_per_token": kv_bytes,
            "million_tokens_bytes": 1_000_000 * kv_bytes,
            "state_bytes": shape.state_bytes,
            "machine": machine._asdict(),
            "break_even": [row._asdict() for row in rows],
        }
        print(json.dumps(document, indent=1))
        return 0
    _print_shape(shape, kv_bytes)
    verdict = f"   at {asked.bandwidth:g} GB/s" if asked.bandwidth else ""
    computed = f"compute on {machine.num_gpus} {machine.gpu}"
    print(f"{'prompt':>7}  {'KV':>10}  {computed:>18}  {'break-even':>11}{verdict}")
    for row in rows:
        if asked.bandwidth:
            read_s = row.kv_bytes / (asked.bandwidth * _GB)
            verdict = f"   compute (a read: {read_s:.3g} s)"
            if read_s < row.compute_s:
                verdict = f"   read, {read_s:.3g} s"
        print(
            f"{row.num_tokens:7,}  {row.kv_bytes / 2**30:6.3g} GiB  {row.compute_s:16.3g} s"
            f"  {row.bytes_per_s / _GB:6.3g} GB/s{verdict}"
        )
    print(
        f"one prompt alone, {_assumed(machine)}; reading wins above break-even,"
        " and concurrent loads share the bandwidth"
    )
    return 0


def _assumed(machine: Machine) -> str:
    """Describes what the rate of a prefill stands on."""
    if machine.tokens_per_s is not None:
        return f"{machine.tokens_per_s:,.0f} tokens/s"
    return f"{machine.mfu:.0%} of the peak"


def _print_tiers(asked: argparse.Namespace) -> int:
    """Prints by model and by disk rate whether a tier on that disk pays."""
    machine = Machine(asked.gpu, 1, asked.mfu, asked.tokens_per_s)
    length = (asked.prompt or [_TIER_PROMPT])[0]
    rates = [asked.bandwidth] if asked.bandwidth else list(DISK_RATES)
    rows = [
        (shape.name, break_even(shape, machine, length, asked.kv_element_bytes))
        for shape in KNOWN_MODELS
    ]
    if asked.json:
        verdicts = [
            {"model": name, "tokens_per_s": row.num_tokens / row.compute_s}
            | row._asdict()
            | {"verdicts": {f"{rate:g}": verdict_of(rate, row) for rate in rates}}
            for name, row in rows
        ]
        print(json.dumps({"machine": machine._asdict(), "models": verdicts}, indent=1))
        return 0
    print(f"a tier that is read at so many GB/s for each {asked.gpu}; prompts of {length:,} tokens")
    columns = "".join(f"{rate:>7g}" for rate in rates)
    print(f"{'model':<19}  {'prefill, tokens/s':>17}  {'break-even':>11}{columns}")
    for name, row in rows:
        verdicts_of_row = "".join(f"{verdict_of(rate, row):>7}" for rate in rates)
        print(
            f"{name:<19}  {row.num_tokens / row.compute_s:17,.0f}"
            f"  {row.bytes_per_s / _GB:6.3g} GB/s{verdicts_of_row}"
        )
    print(
        f"one prompt alone, {_assumed(machine)}; even: within a factor of {MARGIN:g} of break-even;"
        "\nan instance of several GPUs needs the rate for each, and concurrent loads share it"
    )
    return 0


def _print_shape(shape: ModelShape, kv_bytes: int) -> None:
    print(
        f"{shape.name}: {kv_bytes / 1024:.4g} KiB of KV a token,"
        f" {kv_bytes * 1e6 / 2**30:.3g} GiB a million; {shape.active_params / 1e9:.3g} B parameters"
        " active"
    )
    if shape.state_bytes:
        print(
            f"states of {shape.state_layers} layers: {shape.state_bytes / 2**20:.3g} MiB after each"
            f" prefix that is kept, as much as {shape.state_bytes // kv_bytes:,} tokens of KV"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdstore size", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("config", nargs="?", help="a model's config.json, or its directory")
    add("--gpu", default="H100", help=f"GPU of the prefill instance: {', '.join(PEAK_TFLOPS)}")
    add("--gpus", type=int, default=1, help="of the instance; tiers are judged by one GPU's rate")
    add("--mfu", type=float, default=DEFAULT_MFU, help="the prefill's share of the GPU's peak")
    add("--tokens-per-s", type=float, help="the prefill's rate, if you measured it")
    add("--prompt", type=int, action="append", help="a prompt's length in tokens; may be repeated")
    add("--kv-element-bytes", type=int, help="bytes of an element of KV; 1 for fp8")
    add("--params", type=float, help="active parameters, such as 37e9")
    add("--bandwidth", type=float, help="the store's, or the tier's, GB/s; prints what is faster")
    add("--json", action="store_true", help="print one JSON document")
    return parser
