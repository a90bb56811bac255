"""Small KV caches for tests: an instance with its tensors, which can be compared."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from pdstore import KVPool, LayerSpec, Layout, Namespace, PrefixCacheManager, Settings, Store
from pdstore.format.handoff import Handoff
from pdstore.format.identity import Identity
from pdstore.format.keys import Json
from pdstore.format.layout import Pipeline
from pdstore.settings import LOOKUP_TIMEOUT_S, read_settings
from pdstore.store.transfer import RANGE_BYTES
from pdstore.worker.job_queue import MAX_JOBS
from pdstore.worker.swap.base import Swap

LAYERS = (LayerSpec(2, 8), LayerSpec(2, 8), LayerSpec(2, 8))
BLOCK_BYTES = 64 * 3 * 2 * 16 * 4
"""Payload of a block of 64 tokens of LAYERS in float32."""
POISON = -7.0


def settings_of(**changes: object) -> Settings:
    """Returns settings for tests: a job's deadline is one that a busy machine keeps, too."""
    usual = {"store": "memory://", "staging": "8MiB", "handoff_wait_s": 2.0, "deadline_s": 30.0}
    return read_settings(**{**usual, **changes})


def flat_layout(**fields: object) -> Layout:
    """Returns a layout from the fields of `Identity` and of `Layout` together."""
    of_identity = {field.name for field in dataclasses.fields(Identity)}
    identity = {name: fields.pop(name) for name in [*fields] if name in of_identity}
    return Layout(Identity(**identity), **fields)


def caches_of(
    layout: Layout, num_blocks: int | Sequence[int] = 64, fill: float | None = None
) -> list:
    """Returns a cache for each held layer, random or `fill`: [block, token, head, channel].

    Of a layer with states or pages: [entry, 1, 1, byte], of int8, with a gap behind each entry.
    Of a layer with scales in tensors of their own: these behind it, each [block, token, head].
    num_blocks: for each block table, or a single number for all of them.
    """
    caches = []
    for n, cells in layout.geometry.caches.items():
        spec = layout.identity.layers[n]
        channels = spec.channels
        count = num_blocks if isinstance(num_blocks, int) else num_blocks[cells.table]
        if spec.form is not None:
            entries = torch.randint(-128, 128, (count, 1, 1, channels + 24), dtype=torch.int8)
            entries = entries if fill is None else entries.fill_(int(fill))
            caches.append(entries[..., :channels])
            continue
        shape = (count, cells.entry_tokens, cells.num_heads, channels)
        dtype = getattr(torch, layout.identity.dtype)
        cache = _filled(shape, dtype, fill)
        scales = [_filled(shape[:3], getattr(torch, each), fill) for each in cells.scales]
        caches.append((cache, *scales) if scales else cache)
    return caches


def _filled(shape: Sequence[int], dtype: torch.dtype, fill: float | None) -> torch.Tensor:
    if fill is not None:
        return torch.full(shape, fill).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, dtype=dtype)


class Instance:
    """Both halves over one store, with a paged cache of its own.

    swap: makes the pool's block copies from the layout and the caches; None: the pool's choice.
    rank: the number of a tensor-parallel rank, and how many there are.
    store_url: PDSTORE_STORE in its settings, for what it tells of its store.
    """

    def __init__(
        self,
        store: Store,
        fill: float | None = None,
        *,
        engine_block_tokens: int | Sequence[int] = 16,
        layers: Sequence[LayerSpec] = LAYERS,
        weights: str = "w",
        range_bytes: int = RANGE_BYTES,
        num_blocks: int | Sequence[int] = 64,
        pipeline: Pipeline | None = None,
        swap: Callable[[Layout, list], Swap] | None = None,
        max_jobs: int = MAX_JOBS,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        rank: tuple[int, int] = (0, 1),
        page: str | None = None,
        boundary_tokens: int | None = None,
        dtype: str = "float32",
        draft: str = "",
        store_url: str = "memory://",
        **changes: object,
    ) -> None:
        self.store, self.settings = store, settings_of(store=store_url, **changes)
        self.layout = Layout.of(
            self.settings,
            dtype=dtype,
            layers=layers,
            engine_block_tokens=engine_block_tokens,
            rope="",
            pipeline=pipeline,
            tp_rank=rank[0],
            tp_size=rank[1],
            page=page,
            boundary_tokens=boundary_tokens,
            draft=draft,
        )
        self.namespace: Namespace = self.layout.namespace(self.settings, weights=weights)
        self.caches = caches_of(self.layout, num_blocks, fill)
        if page is not None:  # head before token, as pages of one head must be
            self.caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in self.caches]
        self.cache = PrefixCacheManager(
            self.settings, self.namespace, store=store, lookup_timeout_s=lookup_timeout_s
        )
        self.pool = KVPool(
            self.settings,
            self.layout,
            self.caches,
            self.namespace,
            store=store,
            range_bytes=range_bytes,
            max_jobs=max_jobs,
            swap=None if swap is None else swap(self.layout, self.caches),
        )

    def tokens(self, block_ids: Sequence[int], layer: int = 0) -> torch.Tensor:
        """Returns the KV of a block table as [token, head, channel]."""
        return self.caches[layer][list(block_ids)].flatten(0, 1)

    def close(self) -> None:
        self.pool.close()
        self.cache.close()


def parsed_handoffs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns a list that gets each `kv_transfer_params` whose hand-off is parsed from now on."""
    parsed: list[object] = []
    parse = Handoff.of

    def spy(params: Mapping[str, Json] | None) -> Handoff | None:
        parsed.append(params)
        return parse(params)

    monkeypatch.setattr(Handoff, "of", spy)
    return parsed


MAX_PATIENCE = 4.0


def patience() -> float:
    """Returns how many times longer than on an idle machine a wait may take, by the load."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return min(MAX_PATIENCE, max(1.0, load / cores))


def eventually(condition: Callable[[], object], timeout_s: float = 10.0, log=lambda: "") -> object:
    """Waits until the condition holds and returns its value.

    timeout_s: seconds on an idle machine; a busy one gets more.
    log: returns what a failure shows, such as what the awaited process has printed.
    """
    began = time.monotonic()
    while not (value := condition()):
        late = time.monotonic() - began > timeout_s * patience()
        assert not late, f"the condition did not come true in time\n{log()}"
        time.sleep(0.001)
    return value
