"""`pdstore selftest`: KV of a model's real layout goes to the pool and comes back, bit for bit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from rich.text import Text

from pdstore.cli.answer import Answer, busy, table
from pdstore.cli.model_shape import ModelShape
from pdstore.cli.quantity import duration, size
from pdstore.format.keys import PromptKeys
from pdstore.format.layout import LayerSpec, Layout
from pdstore.outcome import JobResult
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_settings
from pdstore.worker.pool import KVPool

ENGINE_BLOCK = 16
_GRACE_S = 60.0  # jobs and lookups end at their deadlines; this is for a slow machine
_DEFAULT = ModelShape("an 8B model", 32, 32, 2048, 128, 128, 8e9, "bfloat16", 8, is_mla=False)


class _Ended(NamedTuple):
    steps: list[tuple[str, float]]
    problem: str | None


def selftest(url: str | None, model: str | None, num_tokens: int) -> Answer:
    """Hands a prompt of random KV over within this process. Status 1 unless every byte is right.

    The namespace is new, and cleared at the end. With a GPU the KV cache is on it. Raises
    ConfigError; StoreError if the store does not answer at the start.
    """
    given = {"store": url} if url else {}
    weights = f"selftest:{secrets.token_hex(8)}"
    settings = read_settings(**given, weights=weights, role="both", require_store=True)
    shape = ModelShape.of(model) if model else _DEFAULT
    layout = layout_of(settings, shape)
    with busy(f"handing {num_tokens} tokens over"):
        ended = _hand_over(settings, layout, num_tokens)
    num_bytes = num_tokens * shape.kv_bytes()
    rows = [[step, duration(took), _rate(step, took, num_bytes)] for step, took in ended.steps]
    said = f"{num_tokens} tokens of {shape.name}, {size(num_bytes)}"
    verdict = ended.problem or f"{said}: every byte is right"
    colour = "red" if ended.problem else "green"
    return Answer(
        {
            "model": shape.name,
            "tokens": num_tokens,
            "bytes": num_bytes,
            "seconds": dict(ended.steps),
            "problem": ended.problem,
        },
        [table(["", "", ""], rows), Text(verdict, style=colour)],
        status=int(ended.problem is not None),
    )


def layout_of(settings: Settings, shape: ModelShape) -> Layout:
    """Returns the layout of one rank that holds all of a model."""
    if shape.is_mla:
        layer = LayerSpec(1, shape.kv_elements, value_dim=0, kind="mla")
    else:
        layer = LayerSpec(shape.kv_heads, shape.kv_elements // (2 * shape.kv_heads))
    return Layout.of(
        settings,
        dtype=shape.dtype,
        layers=[layer] * shape.layers,
        engine_block_tokens=ENGINE_BLOCK,
        rope="selftest",
    )


def _hand_over(settings: Settings, layout: Layout, num_tokens: int) -> _Ended:
    num_blocks = -(-num_tokens // ENGINE_BLOCK)
    sources, targets = (_caches(layout, num_blocks, fill) for fill in (_random, torch.zeros))
    namespace = layout.namespace(settings, weights=str(settings.weights))
    cache = PrefixCacheManager(settings, namespace)
    prefill = KVPool(settings, layout, sources, namespace)
    decode = KVPool(settings, layout, targets, namespace)
    try:
        steps: list[tuple[str, float]] = []
        keys = cache.keys([secrets.randbelow(1 << 15) for _ in range(num_tokens)])
        problem = _round_trip(settings, cache, prefill, decode, keys, steps)
        if problem is None and not _are_equal(sources, targets, num_tokens):
            problem = "the KV that came back differs from what was saved"
        cache.clear()
        return _Ended(steps, problem)
    finally:
        for pool in (prefill, decode):
            pool.close()
        cache.close()


def _round_trip(
    settings: Settings,
    cache: PrefixCacheManager,
    prefill: KVPool,
    decode: KVPool,
    keys: PromptKeys,
    steps: list[tuple[str, float]],
) -> str | None:
    """Saves, finds and loads a prompt; returns what went wrong."""
    block_ids = range(-(-keys.num_tokens // ENGINE_BLOCK))
    handoff, params = cache.announce(keys)

    def timed(step: str, function: Callable[[], JobResult]) -> str | None:
        start = time.perf_counter()
        result = function()
        steps.append((step, time.perf_counter() - start))
        if result.num_tokens == keys.num_tokens:
            return None
        why = result.reason.value if result.reason else "unknown"
        return f"{step}: {result.num_tokens} of {keys.num_tokens} tokens ({why}: {result.error})"

    save_s, load_s = settings.save_deadline_s + _GRACE_S, settings.load_deadline_s + _GRACE_S
    problem = timed("save", lambda: prefill.save(keys, block_ids, handoff=handoff).wait(save_s))
    if problem is not None:
        return problem
    start = time.perf_counter()
    found = cache.lookup(keys, params).wait(settings.handoff_wait_s + _GRACE_S)
    steps.append(("find", time.perf_counter() - start))
    if found is None or found.num_tokens != keys.num_tokens:
        return f"find: {found.num_tokens if found else 0} of {keys.num_tokens} tokens"
    return timed("load", lambda: decode.load(found.keys, block_ids).wait(load_s))


def _caches(
    layout: Layout, num_blocks: int, fill: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, layout.dtype)
    return [
        fill(num_blocks, ENGINE_BLOCK, spec.num_kv_heads, spec.channels, device=device).to(dtype)
        for spec in layout.layers
    ]


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device)


def _are_equal(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], num_tokens: int
) -> bool:
    return all(
        torch.equal(
            source.flatten(0, 1)[:num_tokens].view(torch.uint8),
            target.flatten(0, 1)[:num_tokens].view(torch.uint8),
        )
        for source, target in zip(sources, targets, strict=True)
    )


def _rate(step: str, seconds: float, num_bytes: int) -> str:
    return "" if step == "find" else f"{num_bytes / seconds / 1e9:.2g} GB/s"
