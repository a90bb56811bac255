"""Adapter: integrates pdstore in the engine, for lookups, loads, saves and hand-offs.

PrefixCacheManager belongs to the scheduler and KVPool to the worker; this engine has both in one
process. Nothing here waits: a turn starts lookups and jobs, later turns poll them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import pdstore
from examples.mini_engine.attention import Chunk
from examples.mini_engine.config import Config
from examples.mini_engine.model import Model
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Request, State
from examples.mini_engine.tracker import Tracker
from pdstore.self_test import self_test
from pdstore.status.reporting import Reporting

log = logging.getLogger(__name__)


class Adapter:
    """One engine's access to the pool. Any thread may call `ready` and `check`.

    An exception in pdstore costs a request its hits or its hand-off, and nothing else.

    cache, pool: the scheduler's and the worker's half of pdstore.
    journal: the records of the last requests.
    """

    def __init__(
        self, config: Config, model: Model, cache: PagedCache, metrics: pdstore.Metrics
    ) -> None:
        settings = config.settings
        layer = pdstore.LayerSpec(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
        layout = pdstore.Layout.of(
            settings,
            dtype=config.dtype,
            layers=[layer] * model.num_layers,
            engine_block_tokens=config.block_size,
            rope=model.rope,
        )
        weights = pdstore.weights_revision(config.model, settings)
        namespace = layout.namespace(settings, weights=weights)
        if settings.selftest:
            self_test(settings, layout, cache.layers)
        self._settings = settings
        self._metrics = metrics
        self.cache = pdstore.PrefixCacheManager(
            settings,
            namespace,
            metrics=metrics,
            longest_prompt=model.max_model_len,
            weights_of=partial(pdstore.weights_revision, config.model),
        )
        self.pool = pdstore.KVPool(settings, layout, cache.layers, namespace, metrics=metrics)
        self._break_even = pdstore.BreakEven(settings.load, namespace.block_tokens, metrics=metrics)
        registries = [metrics.registry]
        self.reporting = Reporting(settings, self.cache, registries, lambda: self.problem)
        self.journal = self.reporting.journal
        self._trackers: dict[Request, Tracker] = {}

    def ready(self) -> None:
        """Waits until host memory is pinned; that goes on beside the rest of the engine's start."""
        self.pool.ready()

    @property
    def problem(self) -> str | None:
        """The trouble of the pool, in a sentence; None while all is well."""
        return self.pool.problem or self.cache.problem

    def check(self, request: Request) -> None:
        """Raises ValueError for a malformed hand-off: `kv_transfer_params` come from a client."""
        pdstore.Handoff.of(request.kv_transfer_params)

    def look_up(self, request: Request) -> None:
        """Starts a lookup: how much of the prompt the pool has, or when to follow a hand-off."""
        with self._degrading(request):
            timer = pdstore.RequestTimer()
            timer.begin("wait")
            is_prefill = self.cache.is_prefill(request.kv_transfer_params)
            keys = self.cache.keys(request.prompt)
            lookup = self.cache.follow(keys, None if is_prefill else request.kv_transfer_params)
            tracker = self._trackers[request] = Tracker(keys, lookup, timer)
            if is_prefill:
                tracker.handoff, request.answer_params = self.cache.announce(
                    keys, request.kv_transfer_params
                )

    def is_looked_up(self, request: Request) -> bool:
        tracker = self._trackers.get(request)
        return tracker is None or tracker.poll() is not None

    def load(self, request: Request) -> bool:
        """Starts to load the hit into the request's blocks. Returns False if there is none.

        The load of a hand-off takes each block as soon as P has stored it.
        """
        with self._degrading(request):
            tracker = self._trackers.get(request)
            found = tracker.poll() if tracker else None
            if tracker is None or found is None:
                return False
            request.miss_reason = found.reason and found.reason.value
            num_prompt = len(request.prompt)
            usable = found.num_tokens if num_prompt > 1 else 0
            follows = found.follow is not None
            decision = self._break_even.decide(
                request, start=0, found=usable, num_tokens=num_prompt, follows=follows
            )
            request.decision = decision
            if decision.num_tokens > 0:
                keys = found.keys.prefix(decision.num_tokens)
                tracker.timer.begin("load")
                tracker.load = self.pool.load(keys, request.block_ids, follow=found.follow)
            return tracker.load is not None
        return False

    def is_loaded(self, request: Request) -> bool:
        """True if the load has ended.

        Its tokens then count as computed, except the prompt's last one: its logits are needed.
        """
        tracker = self._trackers.get(request)
        if tracker is None or tracker.load is None:
            return True
        result = tracker.load.result
        if result is None:
            return False
        tracker.timer.end("load")
        self._metrics.exposed_seconds.observe(tracker.timer.elapsed_s)
        if result.reason is not None:
            request.miss_reason = result.reason.value
        self._break_even.worked(request, result.busy_s)
        self._break_even.load_ended(request, result.num_tokens)
        self.cache.note_load(result.num_tokens, result.busy_s)
        tracker.num_saved = result.num_tokens
        request.num_loaded = min(result.num_tokens, len(request.prompt) - 1)
        request.num_computed = request.num_loaded
        return True

    def lost(self, request: Request) -> str | None:
        """Returns why a hand-off fell short, if PDSTORE_ON_MISS says that its request must fail."""
        params = request.kv_transfer_params
        expects = pdstore.Handoff.of(params) is not None and not self.cache.is_prefill(params)
        if self._settings.on_miss != "fail" or not expects:
            return None
        tracker = self._trackers.get(request)
        found = tracker.lookup.poll() if tracker else None
        if tracker is None or found is None:
            return request.miss_reason
        result = tracker.load.result if tracker.load else None
        reason = found.reason or (result.reason if result else None)
        return reason.value if reason else request.miss_reason

    @contextlib.contextmanager
    def saving(self, chunks: Sequence[Chunk]) -> Iterator[Callable[[int], None]]:
        """Saves the KV of prompts that a step in here computes; a last chunk publishes its prompt.

        With PDSTORE_SAVE_DECODED=1 the blocks that answers fill are saved, too.

        Yields the `layer_written` of `Step`: the blocks of a layer range are stored as soon as its
        last layer is written, while the model computes the next ones. If the step fails, so do its
        saves.
        """
        saves: dict[Request, pdstore.OpenSave] = {}
        for chunk in chunks:
            is_prompt = chunk.request.state is State.PREFILL
            with self._degrading(chunk.request):
                save = self._begin_save(chunk) if is_prompt else self._begin_decoded_save(chunk)
                if save is not None:
                    saves[chunk.request] = save

        def layer_written(layer: int) -> None:
            for request, save in saves.items():
                with self._degrading(request), _cancelling(save.job):
                    save.layers_done(layer + 1)

        start = time.monotonic()
        prompts = [chunk for chunk in chunks if chunk.request.state is State.PREFILL]
        with contextlib.ExitStack() as failing:
            for save in saves.values():
                failing.enter_context(_cancelling(save.job))
            yield layer_written
            for chunk in chunks:
                self._note_computed(chunk)
        for outcome in self._break_even.computed(prompts, time.monotonic() - start):
            cast("Request", outcome.name).took_s = outcome.took_s

    def end(self, request: Request) -> None:
        """Cancels the lookup and the load of a request that has ended, if they still run.

        D is told of a hand-off that nothing publishes, also because its save could not begin.
        """
        self._break_even.forget(request)
        with self._degrading(request):
            tracker = self._trackers.get(request)
            if tracker is not None:
                tracker.lookup.cancel()
                if tracker.load is not None:
                    tracker.load.cancel()
                if tracker.handoff is not None and tracker.publish is None:
                    self.pool.abort_handoff(tracker.handoff)

    def is_done(self, request: Request) -> bool:
        """True if no job reads or writes the request's blocks: they may be given back."""
        tracker = self._trackers.get(request)
        if tracker is None:
            return True
        is_done = all(job.done for job in (tracker.load, tracker.publish) if job is not None)
        if not (is_done and all(job.captured for job in tracker.saves)):
            return False
        del self._trackers[request]
        tracker.when_saved(lambda: self.journal.add(tracker.record(request, self._settings.role)))
        return True

    def close(self) -> None:
        """Gives running jobs the drain time, then ends them. May be called twice."""
        self.pool.close()
        self.cache.close()
        self.reporting.close()

    def _note_computed(self, chunk: Chunk) -> None:
        tracker = self._trackers.get(chunk.request)
        if tracker is not None and chunk.request.state is State.PREFILL:
            tracker.timer.end("compute")

    def _begin_save(self, chunk: Chunk) -> pdstore.OpenSave | None:
        """Starts to save the blocks that a chunk completes; None if there are none."""
        request, tracker = chunk.request, self._trackers.get(chunk.request)
        if tracker is None:
            return None
        tracker.timer.begin("compute")
        if self._settings.role == "decode":
            return None
        if tracker.handoff is not None and not tracker.is_started:
            tracker.is_started = True
            if pdstore.Handoff.of(request.kv_transfer_params) is not None:
                self.pool.start_handoff(tracker.handoff, len(request.prompt))
        keys = tracker.keys.prefix(chunk.stop)
        handoff = tracker.handoff if chunk.stop == len(request.prompt) else None
        if handoff is None and keys.num_tokens <= tracker.num_saved:
            return None
        save = self.pool.begin_save(
            keys,
            request.block_ids,
            first_token=tracker.num_saved,
            handoff=handoff,
            after=tuple(tracker.saves) if handoff else (),
        )
        if handoff is not None:
            tracker.publish = save.job
            save.job.on_end(self._note_published)
        tracker.add_save(save.job)
        tracker.num_saved = keys.num_tokens
        return save

    def _note_published(self, job: pdstore.Job) -> None:
        self.cache.note_saves([job.result.reason] if job.result else [])

    def _begin_decoded_save(self, chunk: Chunk) -> pdstore.OpenSave | None:
        """Starts to save the block that a token of an answer fills; None if it fills none."""
        request, tracker = chunk.request, self._trackers.get(chunk.request)
        if tracker is None or not self._settings.save_decoded:
            return None
        if chunk.stop % tracker.keys.block_tokens or chunk.stop <= tracker.num_saved:
            return None
        keys = tracker.decoded or tracker.keys.prefix(len(request.prompt) - 1)
        tracker.decoded = keys.extend(request.token_ids[keys.num_tokens : chunk.stop])
        save = self.pool.begin_save(keys, request.block_ids, first_token=tracker.num_saved)
        tracker.saves.append(save.job)
        tracker.num_saved = chunk.stop
        return save

    @contextlib.contextmanager
    def _degrading(self, request: Request) -> Iterator[None]:
        try:
            yield
        except Exception:  # the border with pdstore: a fault is a miss
            log.exception("pdstore failed for a request, which goes on without it")
            self._metrics.miss(pdstore.Reason.FAULT)
            request.miss_reason = pdstore.Reason.FAULT.value


@contextlib.contextmanager
def _cancelling(job: pdstore.Job) -> Iterator[None]:
    """Cancels a job if the code in here fails."""
    try:
        yield
    except BaseException:
        job.cancel()
        raise
