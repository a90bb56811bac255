"""HostPages: the pages of one of SGLang's host pools, how they are named and where they lie.

SGLang keeps the KV of full attention in one host pool. Beside it, a model may have host pools with
sliding windows, Mamba states or the indexer of sparse attention; SGLang calls them sidecars. Those
of a draft model are optional: a page that is missing there is zeroed, and the draft is cold.
"""

# Decision: docs/decisions/034-sglang-pages.md
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pdstore.errors import ConfigError, LayoutError
from pdstore.format.geometry import Geometry, PartGeometry
from pdstore.format.identity import Identity, LayerSpec
from pdstore.format.keys import canonical
from pdstore.format.layout import Layout, Pipeline

VERSIONS = "0.5.17 to 0.5.23"
KV = "kv"
_MHA = "MHATokenToKVPoolHost"
_MLA = "MLATokenToKVPoolHost"
_MAMBA = "MambaPoolHost"
_INDEXER = "DSAIndexerPoolHost"
_LAYOUTS = {
    _MHA: ("layer_first", "page_first", "page_first_direct", "page_head"),
    _MLA: ("layer_first", "page_first", "page_first_direct"),
    _MAMBA: ("page_first", "page_first_direct"),
    _INDEXER: ("layer_first", "page_first", "page_first_direct"),
}
_KINDS = {
    **{KV: (_MHA, _MLA), "swa": (_MHA, _MLA), "mamba": (_MAMBA,), "indexer": (_INDEXER,)},
    **{"draft": (_MHA, _MLA), "draft_indexer": (_INDEXER,), "draft_swa": (_MHA, _MLA)},
}
"""By SGLang's name of a host pool, the classes that pdstore can read."""
DRAFTS = frozenset({"draft", "draft_indexer", "draft_swa"})
"""SGLang's names of the host pools of a draft model."""
_REFUSED = {
    "auxiliary_swa": "a second sliding window",
    "deepseek_v4": "the compressed KV of DeepSeek V4",
}
"""By the beginning of their names, what other host pools of SGLang have."""


class ServedModel(NamedTuple):
    """The fields of a namespace that cannot be read from the host pool.

    dtype: torch's name of the KV cache's element type.
    weights: the weights' revision.
    rope: as `Identity` takes it.
    quantization: SGLang's arguments about quantization and KV scales; None if none of them is set.
    state_kernels: SGLang's arguments about the kernels that read and write Mamba states.
    draft: what names the draft model, as `Identity` takes it; empty without host pools of a draft.
    """

    dtype: str
    weights: str
    rope: str
    quantization: str | None
    state_kernels: str = ""
    draft: str = ""


@dataclass(frozen=True)
class HostPages:
    """The pages of one host pool of a rank.

    A stored page has the bytes of the host pool: of KV, first those of K, then those of V; for MLA
    only those of the latents. A page needs one copy for K and one for V. In the layout
    `layer_first`, it needs one copy for each layer of K and one for each layer of V.

    SGLang names the state of a whole prefix by the prefix's last page: here it is a page as well.

    layout: says where the pages lie; of a draft, its layers are as needed as others here. Each
      contiguous piece of a page is a cell.
    identity: of all host pools together, in which a draft's layers are optional.
    caches: for each piece, a view of the host pool: [pages, bytes of the piece].
    page_indices: how many of SGLang's indices a page has: one for each token, one for a state.
    """

    layout: Layout
    identity: Identity
    caches: list[torch.Tensor]
    page_indices: int

    def numbers(self, host_indices: torch.Tensor, num_pages: int) -> list[int]:
        """Returns the pages' numbers. host_indices: SGLang's indices of each page, in order.

        Raises LayoutError for indices that are not `num_pages` whole pages.
        """
        step = self.page_indices
        firsts = host_indices[::step]
        if len(host_indices) != num_pages * step or bool((firsts % step).any()):
            raise LayoutError(f"{len(host_indices)} indices are not {num_pages} pages of {step}")
        numbers: list[int] = (firsts // step).tolist()
        return numbers


def check_host_pool(name: str, pool: Any) -> None:
    """Raises ConfigError for a host pool that pdstore does not support. name: SGLang's for it."""
    if name not in _KINDS:
        texts = (text for start, text in _REFUSED.items() if name.startswith(start))
        what = next(texts, "something that this version does not know")
        raise ConfigError(
            f"pdstore does not keep the pages of the pool {name}, and KV without them would give"
            f" wrong answers: it has {what}. Turn off what needs it, or the storage backend"
        )
    kind = type(pool).__name__
    if kind not in _KINDS[name] or pool.layout not in _LAYOUTS[kind]:
        raise ConfigError(
            f"pdstore does not support the host pool {kind} ({name}) with the layout"
            f" {pool.layout}: of SGLang {VERSIONS} it serves full attention, MLA, sliding windows,"
            f" Mamba states and DSA's indexer, drafts with these too, and for --hicache-mem-layout"
            f" {', '.join(_LAYOUTS[_MHA])} (for states {', '.join(_LAYOUTS[_MAMBA])})"
        )
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise ConfigError(
            f"the host pool {name} shares its memory with other pools, which may move its pages:"
            " pdstore supports only host pools with memory of their own"
        )


def pages_of(
    pools: Mapping[str, Any], served: ServedModel, tp_rank: int, tp_size: int
) -> dict[str, HostPages]:
    """Returns the pages of each host pool of a rank, by SGLang's names; `KV` is one of them.

    The first layers of the namespace are those of KV. Those of any other pool follow, a draft's at
    the end, each kind in a block table of its own; the pools count as the stages of a pipeline, so
    a pool's values have only its layers. Raises ConfigError for an unsupported pool.
    """
    names = sorted(pools, key=lambda name: (name != KV, name in DRAFTS, name))
    for name in names:
        check_host_pool(name, pools[name])
    kv = pools[KV]
    pieces = {name: _pieces(pools[name]) for name in names}
    layers = {KV: [_kv_layer(kv, tp_size)] * kv.layer_num}
    for table, name in enumerate(names[1:], 1):
        window_of = None if name in DRAFTS else kv.dtype
        forms = _forms(pools[name], served, window_of, tp_size, len(pieces[name]))
        made = _sidecar_layers(pools[name], pieces[name], forms, kv.page_size, tp_size)
        optional = name in DRAFTS
        layers[name] = [replace(layer, table=table, optional=optional) for layer in made]
    identity = Identity(
        dtype=served.dtype,
        layers=tuple(layer for name in names for layer in layers[name]),
        block_tokens=kv.page_size,
        rope=served.rope,
        quantization=served.quantization,
        page=f"sglang:{kv.layout}",  # its name for the order of bytes in a page
        num_shards=tp_size,
        draft=served.draft,
    )
    # a pool of its own saves and loads a draft's pages: there they are all that is needed
    needed = replace(identity, layers=tuple(replace(of, optional=False) for of in identity.layers))
    stages = tuple(stage for stage, name in enumerate(names) for _ in layers[name])
    pages = {}
    for stage, name in enumerate(names):
        pipeline = Pipeline(stages, stage)
        by_layer = Layout(needed, kv.page_size, tp_rank, tp_size, pipeline)
        given = _in_pieces(by_layer, len(pieces[KV])) if name == KV else _in_one_table(by_layer)
        layout = replace(by_layer, given=given)
        pages[name] = HostPages(layout, identity, pieces[name], pools[name].page_size)
    return pages


def _kv_layer(pool: Any, tp_size: int) -> LayerSpec:
    if type(pool).__name__ == _MLA:  # every rank has all latents, and only one rank saves them
        return LayerSpec.latent(pool.kv_cache_dim)
    return LayerSpec(pool.head_num * tp_size, pool.head_dim)


def _pieces(pool: Any) -> list[torch.Tensor]:
    """Returns the pieces of a host pool that each have contiguous bytes of every page."""
    kind = type(pool).__name__
    if kind == _MAMBA:
        tensors = list(pool.kv_buffer)  # one of each kind of state, with all layers
    elif kind == _INDEXER:
        tensors = [pool.index_k_with_scale_buffer]
    else:
        tensors = [pool.kv_buffer] if kind == _MLA else list(pool.kv_buffer)
    if pool.layout == "layer_first":
        tensors = [layer for tensor in tensors for layer in tensor]
    num_pages = pool.size // pool.page_size
    if kind == _INDEXER:  # it has a page more than the pool of KV, whose numbers it uses
        num_pages = len(tensors[0])
    return [tensor.view(num_pages, -1).view(torch.uint8) for tensor in tensors]


def _sidecar_layers(
    pool: Any, pieces: Sequence[torch.Tensor], forms: Sequence[str], tokens: int, tp_size: int
) -> list[LayerSpec]:
    """Returns a layer for each piece of a sidecar's pages, whatever they have: a page is bytes.

    They are of no block table yet. forms: what the bytes of each piece are.
    """
    is_whole = type(pool).__name__ in (_MLA, _INDEXER)  # states are split, even beside latents
    layers = [
        LayerSpec.page(piece.shape[1], tokens, form)
        for piece, form in zip(pieces, forms, strict=True)
    ]
    if is_whole:
        return layers
    return [replace(layer, num_kv_heads=tp_size, is_whole=False) for layer in layers]


def _forms(
    pool: Any, served: ServedModel, window_of: torch.dtype | None, tp_size: int, num_pieces: int
) -> list[str]:
    """Returns what the bytes of each piece of a sidecar's pages are.

    window_of: the element type of the KV whose windows the pool may have; None for a draft's pool.
    Raises ConfigError for a sliding window of another element type than that of KV, and for an
    indexer on an AMD GPU.
    """
    kind = type(pool).__name__
    if kind == _MAMBA:
        shapes = [[str(tensor.dtype), *tensor.shape[1:]] for tensor in pool.kv_buffer]
        return [canonical([kind, served.state_kernels, *shape]) for shape in shapes]
    if kind == _INDEXER:
        if torch.version.hip:
            raise ConfigError(
                "pdstore does not support the indexer of sparse attention on AMD GPUs, where"
                " SGLang keeps its rows in another order: serve such a model on NVIDIA GPUs, or"
                " without --hicache-storage-backend"
            )
        shape = [str(pool.indexer_dtype), pool.layer_num, pool.indexer_page_stride_size]
        return [canonical([kind, pool.layout, *shape])] * num_pieces
    if window_of not in (None, pool.dtype):
        raise ConfigError(
            f"the host pool of sliding windows has {pool.dtype}, and that of KV {window_of}:"
            " pdstore supports only windows of KV's type"
        )
    heads = [pool.kv_cache_dim] if kind == _MLA else [pool.head_num * tp_size, pool.head_dim]
    what = "window" if window_of else str(pool.dtype)
    return [canonical([kind, pool.layout, what, pool.layer_num, *heads])] * num_pieces


def _in_one_table(layout: Layout) -> Geometry:
    """Returns what lies where in a sidecar's pages: its own numbers are its only block table."""
    geometry = layout.geometry
    caches = {number: replace(cache, table=0) for number, cache in geometry.caches.items()}
    parts = {
        part: replace(of, cache=replace(of.cache, table=0)) for part, of in geometry.parts.items()
    }
    return Geometry(layout.block_tokens, (layout.block_tokens,), caches, parts)


def _in_pieces(layout: Layout, num_pieces: int) -> Geometry:
    """Returns what lies where in host pages that are equal pieces, one in each of several tensors.

    A payload is then the page as it lies in memory, with all layers and heads of this rank, piece
    after piece: so all layers are equal, in one layer range and one shard of this rank.
    """
    [(part, whole)] = layout.geometry.parts.items()
    piece = replace(
        whole.cache,
        cell_bytes=whole.payload_bytes(layout.block_tokens) // num_pieces,
        num_heads=1,
        dtype=None,
    )
    caches = dict.fromkeys(range(num_pieces), piece)
    parts = {part: PartGeometry(tuple(caches), piece, 0, 1)}
    return Geometry(layout.block_tokens, (layout.block_tokens,), caches, parts)
