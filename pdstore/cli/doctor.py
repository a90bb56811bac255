"""`pdstore doctor`: runs all checks. The checks that use the store are in this module."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from pydantic import ByteSize

from pdstore.cli.answer import Answer, Finding, Level, answer_of, bad, info, ok, size, warn
from pdstore.cli.host import (
    MOUNTS,
    available_memory,
    check_limits,
    check_memory,
    check_native,
    check_pages,
    check_settings,
    check_traces,
)
from pdstore.cli.output import duration
from pdstore.cli.peers import check_peers
from pdstore.engine.self_test import StepFailed, Tried, self_test
from pdstore.errors import (
    ConfigError,
    PDStoreError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.format.identity import LayerSpec
from pdstore.format.layout import Layout
from pdstore.settings import Settings, read_settings
from pdstore.sizing import ModelShape
from pdstore.store import open_store
from pdstore.store.base import Store
from pdstore.store.connect import place_of, read_pool_id
from pdstore.store.guard import problem_of
from pdstore.store.optional import DoubtsServer, Room, TellsOrigins, TellsRoom, tiers_of
from pdstore.store.seal import seal_store
from pdstore.store.tiers.lower import Limits
from pdstore.store.tiers.places import place_doubts
from pdstore.store.tiers.purges import PurgeWatch, purged_namespaces
from pdstore.store.url import Place, StoreURL
from pdstore.worker.mover import check_values_fit

ENGINE_BLOCK = 16
"""Tokens of an engine block, unless the user gives another number. It is vLLM's default."""

_TINY = ModelShape("a tiny model", 1, 1, 16, 8, 8, 0.0, "bfloat16", 1, is_mla=False)
_8B = ModelShape("an 8B model", 32, 32, 2048, 128, 128, 8e9, "bfloat16", 8, is_mla=False)
_TRIED_BYTES = 32 << 20
_SMALL_POOL = 100 * _TRIED_BYTES  # in a larger pool, it does not matter what the test evicts
_STAGING = ByteSize(256 << 20)
_CONNECTIONS = 64
_SHORT_PROMPT = 4096
_ALIVE = "check that the server runs, and that its URL is right"
_DENIED = "check that user and password in PDSTORE_STORE are right, and what this user may do"
_LOST = (
    "find out who takes values away: other users of the store, an eviction for want of room, a life"
    " (PDSTORE_BLOCK_TTL_S) that is too short, or two servers behind one address"
)
_SLOW = "find out why the server is slow or hangs, or whether a firewall drops what is sent to it"
_MORE = "give the store more memory, or empty it"


def check_store(settings: Settings, shape: ModelShape | None, num_gpus: int) -> Iterator[Finding]:
    """Yields the findings about the store at PDSTORE_STORE. Raises ConfigError for a bad URL.

    shape: the model; None stands for an 8B model. num_gpus: the number of GPUs on this host.
    """
    place = place_of(settings.store, settings)
    missing = place.missing_path
    with opened(settings, place) as plain:
        if "store" not in settings.model_fields_set:
            yield info("PDSTORE_STORE", f"{plain.label} (not set: the default)")
        for tier in tiers_of(plain):
            if (tells := tier.optional(TellsOrigins)) is not None:
                yield info(tier.label.partition("://")[0], tells.origins)
        store = seal_store(plain, settings)
        tried = try_store(settings, store)
        yield tried
        if tried.subject == "connect":
            return
        yield from check_server(tiers_of(plain)[0])
        yield from check_room(plain, shape.kv_bytes() if shape else None)
        if tried.remedy == "":
            yield measure(settings, store, shape)
        yield from check_tiers(settings, plain, shape)
        yield from _check_pages_of(place, num_gpus)
        if missing is not None and place.trial_url is not None:
            yield info("pool", f"there is no {missing} yet: the first P or D makes it")
        else:
            yield from _check_contents(plain)


def _check_pages_of(place: Place, num_gpus: int) -> Iterator[Finding]:
    for each in place.tiers:
        if each.path is not None:
            path = each.path.resolve()
            yield from check_pages(path, MOUNTS.read_text(), num_gpus, is_arena=each.is_memory)


@contextlib.contextmanager
def opened(settings: Settings, place: Place) -> Iterator[Store]:
    """Opens the store; if that would settle a new pool's size, one that is removed at the end."""
    is_trial = place.missing_path is not None and place.trial_url is not None
    url = place.trial_url if is_trial and place.trial_url else settings.store
    trial = place_of(url, settings).path if is_trial else None
    with contextlib.ExitStack() as undo:
        store = undo.enter_context(contextlib.closing(open_store(url, settings)))
        if trial is not None:
            undo.callback(trial.unlink)
        yield store


def check_tiers(settings: Settings, store: Store, shape: ModelShape | None) -> Iterator[Finding]:
    """Yields findings about the tiers of a store that has several: each lower one is tried."""
    above, *lower = tiers_of(store)
    if not lower:
        return
    url = StoreURL.of(settings.store)  # `store` may be one to try things with
    first, *others = url.tiers
    yield info(
        "tiers",
        f"P and D meet in {first.label}; blocks that are copied below serve each instance that"
        " has the same tiers: a directory must be the same one for all",
    )
    for doubt in place_doubts(url, settings):
        yield warn(f"tiers: {doubt.subject}", doubt.said, doubt.remedy)
    for number, (tier, each) in enumerate(zip(lower, others, strict=True), start=1):
        limits = Limits.of(each)
        yield info(
            f"tier {number}",
            f"{tier.label}: each process copies up to {limits.copy_bytes_per_s / 1e6:g} MB/s to it"
            f" (copy), and a search of it waits up to {duration(limits.look_s)} (look)",
        )
        for found in _check_tier(settings, tier, shape):
            yield found._replace(subject=f"tier {number}: {found.subject}")
        for found in check_purges(above, tier):
            yield found._replace(subject=f"tier {number}: {found.subject}")


def check_purges(first: Store, lower: Store) -> Iterator[Finding]:
    """Yields a warning for each namespace of which nothing is copied to or from a lower tier."""
    watch = PurgeWatch(first, lower)
    with contextlib.suppress(StoreError):  # another finding tells of the error
        for namespace in sorted(purged_namespaces(first) | purged_namespaces(lower)):
            why = watch.why_forbidden(namespace)
            if why is not None:
                remedy = f"run pdstore purge --namespace {namespace} on this host"
                yield warn("purge", why, remedy)


def _check_tier(settings: Settings, tier: Store, shape: ModelShape | None) -> Iterator[Finding]:
    """Yields findings about one lower tier: tried, doubted and measured as a whole store is."""
    store = seal_store(tier, settings)
    tried = try_store(settings, store)
    why = problem_of(tier)
    if tried.level is Level.BAD and why and why not in tried.said:  # its breaker is open
        tried = tried._replace(said=f"{tried.said}: {why}")
    yield tried
    if tried.subject == "connect":
        return
    yield from check_server(tier)
    yield from check_room(tier, shape.kv_bytes() if shape else None)
    if tried.remedy == "":
        yield measure(settings, store, shape)


def try_store(settings: Settings, store: Store) -> Finding:
    """Saves, finds, loads and removes a small prompt; returns whether that worked."""
    layout = layout_of(settings, _TINY)
    try:
        _try(settings, store, layout, layout.block_tokens)
    except StepFailed as error:
        return bad(error.step, error.why, error.remedy or _remedy_of(error.__cause__))
    return ok("round trip", "save, find, load, compare and remove are right")


def measure(settings: Settings, store: Store, shape: ModelShape | None) -> Finding:
    """Returns a finding: whether a load of the model's KV is right, and how fast it is."""
    tried_shape = shape or _8B
    layout = layout_of(settings, tried_shape)
    num_tokens = max(1, _TRIED_BYTES // tried_shape.kv_bytes() - 1)  # 255 for an 8B model
    try:
        check_values_fit(store, layout.geometry)
        if _is_full(store):
            return info("speed", "not measured: 32 MiB would push others' values out")
        tried = _try(settings, store, layout, num_tokens)
    except ConfigError as error:
        again = "stop P and D first, and run this again after it"
        # without `model` it is only the 8B model that does not fit
        return bad("block size", str(error), again) if shape else info("speed", str(error))
    except StepFailed as error:
        if isinstance(error.__cause__, StoreFull):
            return bad("room", f"32 MiB do not fit: {error.why}", error.remedy or _MORE)
        if error.step == "find":
            message = f"values were lost at once: {error.why}"
            return bad("room", message, "give the store more memory: it evicts what was just put")
        remedy = error.remedy or _remedy_of(error.__cause__)
        return bad(f"speed: {error.step}", error.why, remedy)
    seconds = tried.seconds
    rates = [tried.num_bytes / seconds[step] for step in ("save", "load")]
    message = f"KV of {tried_shape.name}, {size(tried.num_bytes)}: every byte is right; find"
    message += f" {duration(seconds['find'])}, save {rates[0] / 1e9:.2g} GB/s,"
    return ok("speed", f"{message} load {rates[1] / 1e9:.2g} GB/s")


def _remedy_of(cause: BaseException | None) -> str:
    """Returns what to do about an error of the store, by its class."""
    if cause is None or not isinstance(cause, StoreError):
        return _LOST if cause is None else ""
    remedies = {StoreDenied: _DENIED, StoreFull: _MORE, StoreUnavailable: _ALIVE}
    remedies |= {StoreTimeout: _SLOW}
    known = (remedy for kind, remedy in remedies.items() if isinstance(cause, kind))
    return next(known, "see the store's own words above, and its log")


def check_server(store: Store) -> Iterator[Finding]:
    """Yields findings about the settings of a store's server, if the server tells them."""
    asks = store.optional(DoubtsServer)
    try:
        for doubt in asks.server_doubts() if asks else ():
            finding = bad if doubt.is_wrong else warn
            yield finding(doubt.subject, doubt.said, doubt.remedy)
    except StoreError as error:
        yield info("server", f"does not tell its settings: {error}")


def layout_of(settings: Settings, shape: ModelShape) -> Layout:
    """Returns the layout of one rank that holds all of a model."""
    layer = LayerSpec.latent(shape.kv_elements)
    if not shape.is_mla:
        layer = LayerSpec(shape.kv_heads, shape.kv_elements // (2 * shape.kv_heads))
    return Layout.of(
        settings,
        dtype=shape.dtype,
        layers=[layer] * shape.layers,
        engine_block_tokens=math.gcd(settings.block_tokens, ENGINE_BLOCK),
        rope="doctor",
    )


def _try(settings: Settings, store: Store, layout: Layout, num_tokens: int) -> Tried:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    identity = layout.identity
    dtype = getattr(torch, identity.dtype)
    shapes = [
        (1, cells.entry_cells, cells.num_heads, identity.layers[layer].channels)
        for layer, cells in layout.geometry.caches.items()
    ]
    caches = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    most = max(_STAGING, 32 * identity.block_bytes)  # pinning more would take long
    own = settings.model_copy(update={"staging": ByteSize(min(settings.staging, most))})
    return self_test(own, layout, caches, num_tokens=num_tokens, store=store)


def _is_full(store: Store) -> bool:
    """Returns whether the values of the test would push other values out of a small pool."""
    teller = store.optional(TellsRoom)
    with contextlib.suppress(StoreError):  # `check_room` reports it
        room = teller.room() if teller is not None else None
        if room is not None and room.capacity_bytes is not None:
            is_full = (room.used_bytes or 0) + _TRIED_BYTES > room.capacity_bytes
            return is_full and room.capacity_bytes < _SMALL_POOL
    return False


_EVICTS = (
    "evicts new blocks before old ones, or a hand-off's markers first: of 25 hand-offs in a full"
    " pool, such policies lost 11 to 21"
)


_EVICTS_ID = (
    "evicts the pool's id as well, if it was not used for a while: until P and D read the new"
    " one, each takes the other for an instance of another pool, and its hand-offs are computed"
)


_LET_EVICT = (
    "to evict the least recently used blocks instead, set maxmemory-policy volatile-lru: then no"
    " lease keeps what D has found and not yet loaded, and what is evicted meanwhile is computed"
)


def check_room(store: Store, kv_bytes: int | None) -> Iterator[Finding]:
    """Yields findings about a store's room for prompts, and about its eviction.

    kv_bytes: KV bytes of a token; None takes an 8B model's.
    """
    teller = store.optional(TellsRoom)
    if teller is None:
        yield info("room", f"{store.label} does not tell how full it is")
        return
    try:
        room = teller.room()
    except StoreError as error:
        yield info("room", f"unknown: {error}")
        return
    yield info("server", f"{room.keeper}, {room.policy}")
    yield _room(room, kv_bytes)
    for policy in room.policy.split(", "):
        if policy.startswith(("allkeys-", "volatile-")) and policy != "volatile-lru":
            why = _EVICTS_ID if policy == "allkeys-lru" else _EVICTS
            yield warn("eviction", f"{policy} {why}", "set maxmemory-policy volatile-lru")
    if room.capacity_bytes and "noeviction" in room.policy.split(", "):
        message = "noeviction: once the server is full, saves are refused until blocks expire"
        yield info("when full", message, _LET_EVICT)
    if room.num_evicted and room.capacity_bytes:
        yield info("evicted", f"{room.num_evicted:,} values since the server's start")
    if room.num_connections is not None and room.num_connections < _CONNECTIONS:
        message = f"{room.num_connections} more are possible; P and D open up to {_CONNECTIONS}"
        yield warn("connections", message, "raise the server's maxclients")


def _room(room: Room, kv_bytes: int | None) -> Finding:
    if room.capacity_bytes is None:
        return warn(
            "room",
            f"{size(room.used_bytes)} used, and no limit",
            "set a limit (maxmemory, ?budget=): the pool fills all room that it gets",
        )
    whose, kv_bytes = ("", kv_bytes) if kv_bytes else (" of an 8B model", _8B.kv_bytes())
    tokens = room.capacity_bytes // kv_bytes
    message = f"{size(room.capacity_bytes)}, KV of {tokens:,} tokens{whose}"
    message += f" ({size(kv_bytes)} each)"
    if tokens < _SHORT_PROMPT:
        return bad(
            "room",
            f"{message}: less than one prompt of {_SHORT_PROMPT:,}",
            f"give it {size(64 * _SHORT_PROMPT * kv_bytes)} or more; docs/sizing.md computes it",
        )
    return ok("room", f"{message}; {size(room.used_bytes)} used")


def _check_contents(store: Store) -> Iterator[Finding]:
    try:
        pool_id = read_pool_id(store).hex()[:8]
        lease = store.lease_s
        yield info("pool", f"id {pool_id}, which P and D must both have; lease {duration(lease)}")
    except PDStoreError as error:
        yield warn("pool", str(error), "see the findings above")


def doctor(
    url: str | None = None,
    peers: Sequence[str] = (),
    model: str | None = None,
    engine_block: int = ENGINE_BLOCK,
    count_gpus: Callable[[], int] = torch.cuda.device_count,
) -> Answer:
    """Checks settings, host, store and peers. Status 1 if something does not work.

    peers: URLs of the status pages of P and D.
    model: the path of a model's config.json, which gives the layout and the size of its KV.
    Raises ConfigError for settings or a URL that cannot be used.
    """
    logging.getLogger("pdstore").addHandler(logging.NullHandler())  # findings replace it
    settings = read_settings(**({"store": url} if url else {}))
    shape = ModelShape.of_config(model) if model else None
    num_gpus = count_gpus()
    return answer_of(
        [
            *check_settings(settings, engine_block, shape.longest_prompt if shape else None),
            *check_memory(settings, available_memory()),
            *check_limits(settings, num_gpus),
            *check_native(settings, num_gpus),
            *check_traces(settings),
            *check_store(settings, shape, num_gpus),
            *check_peers(peers),
        ]
    )
