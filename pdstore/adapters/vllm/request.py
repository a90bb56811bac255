"""One vLLM request as the connector's scheduler half follows it."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdstore.errors import PDStoreError
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import MultimodalItem, PromptKeys
from pdstore.format.namespace import Json
from pdstore.format.weights import weights_revision
from pdstore.scheduler.lookup import Lookup
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings

log = logging.getLogger("vllm.pdstore")


@dataclass
class RequestTracker:
    """What is known of a request.

    keys: of its prompt.
    lookup: on its way or answered; None when nothing may be loaded (any more).
    attempt, answer: set if this instance is P for it: the hand-off, and what P's answer says of it.
    num_saved: leading tokens that are in the pool or on their way.
    decoded: keys of the prompt and of the tokens decoded so far, in whole blocks.
    num_computed: leading tokens that vLLM had when it was last told what was found.
    num_loading: leading tokens there will be when the load that runs has ended.
    """

    request: Any
    keys: PromptKeys
    lookup: Lookup | None = None
    attempt: HandoffId | None = None
    answer: dict[str, Json] = field(default_factory=dict)
    is_announced: bool = False
    num_saved: int = 0
    decoded: PromptKeys | None = None
    num_computed: int = 0
    num_loading: int = 0
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def is_prompt_pending(self) -> bool:
        """Something of the prompt is still to be saved, or to be handed over."""
        is_saved = self.num_saved >= self.keys.num_tokens
        return not is_saved or (self.attempt is not None and not self.is_announced)

    @property
    def is_waiting(self) -> bool:
        """For the answer to its lookup, or for its load."""
        is_asking = self.lookup is not None and self.lookup.poll() is None
        return is_asking or self.num_loading > 0

    def decoded_until(self, num_tokens: int) -> PromptKeys:
        """Keys of the first `num_tokens` tokens, prompt and decoded ones, in whole blocks."""
        if self.decoded is None:
            self.decoded = self.keys.prefix(self.keys.num_tokens - 1)
        step = self.decoded.block_tokens
        end = num_tokens - num_tokens % step
        if end > self.decoded.num_tokens:
            new = self.request.all_token_ids[self.decoded.num_tokens : end]
            self.decoded.extend(list(new))
        return self.decoded.prefix(end)


def keys_of(request: Any, cache: PrefixCacheManager) -> PromptKeys | None:
    """The names of a request's prompt, with all that its KV depends on.

    None for an adapter that has no name, because its files cannot be read.
    """
    salt = (request.cache_salt or "").encode()
    items = [
        MultimodalItem(
            feature.mm_position.offset,
            feature.mm_position.length,
            (getattr(feature, "mm_hash", None) or feature.identifier).encode(),
        )
        for feature in getattr(request, "mm_features", None) or ()
    ]
    lora = request.lora_request
    digest = _lora_digest(lora.lora_int_id, lora.lora_path) if lora else b""
    if digest is None:
        return None
    return cache.keys(
        request.prompt_token_ids,
        lora=digest,
        cache_salt=salt,
        items=sorted(items, key=lambda item: item.offset),
    )


def is_keyed(request: Any, has_pages: bool) -> bool:
    """Whether a request's KV can be named by its tokens, and may be shared.

    A request with a salt of its own shares nothing, and a page is stored with what an earlier
    request left behind its end. An adapter that is loaded in place of another has no name.
    """
    return not (
        request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.pooling_params is not None
        or getattr(request, "resumable", False)
        or getattr(request.lora_request, "load_inplace", False)
        or (has_pages and request.cache_salt)
    )


def is_prefill_of(request: Any, settings: Settings) -> bool:
    """Whether this instance publishes the prompt for another one."""
    params = request.kv_transfer_params or {}
    return settings.role == "prefill" or (
        settings.role == "both" and params.get("do_remote_decode") is True
    )


@functools.lru_cache(maxsize=256)
def _lora_digest(number: int, path: str) -> bytes | None:
    """By what an adapter's files held when its first request came: vLLM has loaded it then."""
    try:
        weights = weights_revision(path, Settings.model_construct(weights=None))
        config = (Path(path) / "adapter_config.json").read_bytes()
    except (PDStoreError, OSError) as error:
        log.warning("requests of the LoRA adapter in %s do not use the pool: %s", path, error)
        return None
    return hashlib.sha256(config).digest() + weights.encode()
