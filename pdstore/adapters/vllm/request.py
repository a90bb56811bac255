"""RequestTracker: the state of one vLLM request on the connector's scheduler side."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdstore.adapters.vllm.messages import EndedJob
from pdstore.adapters.vllm.patience import Patience
from pdstore.errors import PDStoreError
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.format.multimodal import MultimodalItem
from pdstore.format.namespace import Json
from pdstore.format.weights import weights_revision
from pdstore.metrics import Metrics
from pdstore.scheduler.break_even import Outcome
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings
from pdstore.telemetry.request_record import RequestTimer

log = logging.getLogger("vllm.pdstore")


@dataclass
class RequestTracker:
    """The state of one request.

    keys: the keys of its prompt.
    lookup: running or answered; None if nothing may be loaded for this request, or no more.
    was_asked: vLLM has asked for the lookup's answer.
    handoff: the hand-off's id if this instance is P for the request, else None.
    answer: the `kv_transfer_params` of P's answer.
    is_announced: the save that publishes the hand-off has been started.
    is_concurrent: D got the request at the same time, and still waits for P to start.
    must_load: the request has to fail if its hand-off falls short (PDSTORE_ON_MISS).
    num_saved: leading tokens that are in the pool or being saved.
    decoded: keys of the prompt and the tokens decoded so far, in whole blocks.
    num_computed: leading tokens that vLLM had when it last asked what can be loaded.
    outcome: what was decided for what the pool had, once its KV is there.
    num_loading: leading tokens present once the running load has ended; 0 if none runs.
    given: the hand-off that came with the request.
    found: the lookup's match, once vLLM has asked for it.
    num_fed: tokens of the prompt that the model was given here.
    num_jobs, ended: loads and saves of all ranks, and those of them that have ended.
    """

    request: Any
    keys: PromptKeys
    lookup: Lookup | None = None
    was_asked: bool = False
    handoff: HandoffId | None = None
    answer: dict[str, Json] = field(default_factory=dict)
    is_announced: bool = False
    is_concurrent: bool = False
    must_load: bool = False
    num_saved: int = 0
    decoded: PromptKeys | None = None
    num_computed: int = 0
    num_loading: int = 0
    outcome: Outcome | None = None
    given: Handoff | None = None
    found: Match | None = None
    num_fed: int = 0
    num_jobs: int = 0
    ended: list[EndedJob] = field(default_factory=list)
    timer: RequestTimer = field(default_factory=RequestTimer)
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def is_prompt_pending(self) -> bool:
        """True while a part of the prompt is still to be saved, or the hand-off to be published."""
        is_saved = self.num_saved >= self.keys.num_tokens
        return not is_saved or (self.handoff is not None and not self.is_announced)

    def params(self) -> Mapping[str, Json] | None:
        """Returns `kv_transfer_params`; None, with a warning, if their hand-off is malformed."""
        params: Mapping[str, Json] | None = self.request.kv_transfer_params
        try:
            Handoff.of(params)
        except ValueError as error:
            log.warning("%s is taken without a hand-off: %s", self.request.request_id, error)
            return None
        return params

    def end_load(self, metrics: Metrics) -> None:
        """Notes that the running load has ended, and how long the client has waited."""
        self.num_saved, self.num_loading = max(self.num_saved, self.num_loading), 0
        if not self.request.num_output_tokens:  # else it was preempted and does not wait
            metrics.exposed_seconds.observe(time.monotonic() - self.arrived_at)

    def look(self, patience: Patience) -> Match | None:
        """Returns the lookup's match; None while there is none, which is waited for once."""
        assert self.lookup is not None
        found = self.lookup.poll() if self.was_asked else patience.first_answer(self.lookup)
        self.was_asked = True
        if self.found is None and found is not None:
            self.found = found
            self.timer.end("wait")
        return found

    def usable(self, found: Match) -> int:
        """Leading tokens that vLLM may count as computed when the match is loaded.

        vLLM computes a prompt's last token again. If it were told that all tokens are present, it
        would give back the block that only the last token's window still reads.
        """
        known: int = self.request.num_tokens
        return min(found.num_tokens, known - 1 if found.keys.namespace.windows else known)

    def scheduled(self, num_tokens: int) -> None:
        """Notes that a step computes some tokens of this request."""
        start, end = self.request.num_computed_tokens, self.request.num_prompt_tokens
        if self.request.num_output_tokens:
            self.timer.end("compute")
        elif start < end:
            self.timer.begin("compute")
            self.num_fed += min(start + num_tokens, end) - start

    def told(self, load: str) -> dict[str, Json]:
        """Returns what an answer says of the decision; nothing where PDSTORE_LOAD is `always`."""
        if self.outcome is None or load == "always":
            return {}
        _, way, load_s, compute_s = self.outcome.decision
        said: dict[str, Json] = {"decision": way, "took_s": self.outcome.took_s}
        said |= {"estimated_load_s": load_s, "estimated_compute_s": compute_s}
        return {"pdstore_decision": said}

    def decoded_until(self, num_tokens: int) -> PromptKeys:
        """The keys of the whole blocks in the first `num_tokens` prompt and decoded tokens."""
        if self.decoded is None:
            self.decoded = self.keys.prefix(self.keys.num_tokens - 1)
        step = self.decoded.block_tokens
        end = num_tokens - num_tokens % step
        if end > self.decoded.num_tokens:
            new = self.request.all_token_ids[self.decoded.num_tokens : end]
            self.decoded.extend(list(new))
        return self.decoded.prefix(end)


def keys_of(
    request: Any, cache: PrefixCacheManager, hashes_items: bool = True
) -> PromptKeys | None:
    """The keys of a request's prompt; they cover everything that its KV depends on.

    None if no key can (`is_keyed`), and, after a warning, if the files of its LoRA adapter cannot
    be read.
    """
    has_pages = cache.namespace.fields["page"] is not None
    if not is_keyed(request, has_pages=has_pages, hashes_items=hashes_items):
        return None
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


def is_keyed(request: Any, has_pages: bool, hashes_items: bool = True) -> bool:
    """True if a request's KV is determined by its tokens and may be shared.

    has_pages: blocks are stored as the backend's packed pages. The last page may contain what an
      earlier request left behind its end, so a request with a cache salt must not share pages.
    hashes_items: vLLM names images, sounds and videos by their content (`describe.hashes_items`).
    A LoRA adapter that was loaded in place of another one has no identity that a key could hold.
    """
    return not (
        request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.pooling_params is not None
        or getattr(request, "resumable", False)
        or getattr(request.lora_request, "load_inplace", False)
        or (has_pages and request.cache_salt)
        or (not hashes_items and getattr(request, "mm_features", None))
    )


@functools.lru_cache(maxsize=256)
def _lora_digest(number: int, path: str) -> bytes | None:
    """A digest of an adapter's files as of its first request, when vLLM has just loaded them."""
    try:
        weights = weights_revision(path, Settings.model_construct(weights=None))
        config = (Path(path) / "adapter_config.json").read_bytes()
    except (PDStoreError, OSError) as error:
        log.warning("requests with the LoRA adapter in %s bypass the pool: %s", path, error)
        return None
    return hashlib.sha256(config).digest() + weights.encode()
