"""Adapter: integrates pdstore in the engine, for lookups, loads, saves and hand-offs.

PrefixCacheManager belongs to the scheduler and KVPool to the worker; this engine has both in one
process. Nothing here waits: a turn starts lookups and jobs, later turns poll them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pdstore
from examples.mini_engine.attention import Chunk
from examples.mini_engine.config import Config
from examples.mini_engine.model import Model
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Request
from examples.mini_engine.state import FORM

log = logging.getLogger(__name__)


@dataclass
class _Tracked:
    """A request in the pool's terms, and its jobs. publish: the save that ends its hand-off."""

    state: pdstore.EngineRequest
    load: pdstore.Job | None = None
    publish: pdstore.Job | None = None
    saves: list[pdstore.Job] = field(default_factory=list)


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
        layout = _layout_of(config, model, cache)
        weights = pdstore.weights_revision(config.model, settings)
        namespace = layout.namespace(settings, weights=weights)
        caches = [*cache.layers, *([] if cache.states is None else [cache.states.rows])]
        if settings.selftest:
            pdstore.self_test(settings, layout, caches)
        self._settings = settings
        self._metrics = metrics
        self._block_size = config.block_size
        self._states = cache.states
        self.cache = pdstore.PrefixCacheManager(
            settings,
            namespace,
            metrics=metrics,
            longest_prompt=model.max_model_len,
            weights_of=partial(pdstore.weights_revision, config.model),
        )
        self.pool = pdstore.KVPool(
            settings, layout, caches, namespace, metrics=metrics, max_jobs=config.max_jobs
        )
        self._prompt_times = pdstore.PromptTimes.from_settings(settings, namespace, metrics)
        registries = [metrics.registry]
        self.reporting = pdstore.Reporting(settings, self.cache, registries, lambda: self.problem)
        self.journal = self.reporting.journal
        self._records = pdstore.Records(self.journal, settings.role)
        self._requests: dict[Request, _Tracked] = {}

    def ready(self) -> None:
        """Waits until host memory is pinned; that goes on beside the rest of the engine's start."""
        self.pool.ready()

    @property
    def problem(self) -> str | None:
        """The trouble of the pool, in a sentence; None while all is well."""
        return self.pool.problem or self.cache.problem

    def check(self, request: Request) -> None:
        """Parses `kv_transfer_params`, which come from a client. Raises ValueError if malformed."""
        request.asked = pdstore.TransferParams.parse(request.kv_transfer_params)

    def look_up(self, request: Request) -> None:
        """Starts a lookup: how much of the prompt the pool has, or when to follow a hand-off."""
        with self._degrading(request):
            asked = request.asked or pdstore.TransferParams.parse(request.kv_transfer_params)
            if self._leaves_last_token(request, asked):
                request.withhold_last_token()
            state = pdstore.EngineRequest(
                self.cache,
                self._settings,
                self.cache.keys(request.token_ids),  # no more than the prompt so far
                asked,
                id=request.id,
                traceparent=request.traceparent,
                prompt_times=self._prompt_times,
            )
            self._requests[request] = _Tracked(state)

    def is_looked_up(self, request: Request) -> bool:
        tracked = self._requests.get(request)
        return tracked is None or tracked.state.poll()

    def load(self, request: Request) -> bool:
        """Starts to load the hit into the request's blocks. Returns False if there is none.

        The load of a hand-off fills each block as soon as P has stored it.
        """
        tracked = self._requests.get(request)
        if tracked is None:
            return False
        with self._degrading(request):
            end = tracked.state.find(0, request.num_prompt)
            request.miss_reason = _value_of(tracked.state.reason)
            if self._states is not None:  # the next prompt that begins so then finds a state there
                request.chunk_ends.add(tracked.state.junction)
            if end > 0:
                plan = tracked.state.plan_load(end, len(request.block_ids) * self._block_size)
                tables = self._tables_of(request, {plan.keys.num_tokens: request.slot})
                with self._recording(tracked.state, pdstore.Direction.LOAD):
                    tracked.load = self.pool.begin_load(plan, tables)
                self._record_end(tracked.state, tracked.load)
        return tracked.load is not None

    def is_loaded(self, request: Request) -> bool:
        """True if the load has ended.

        Its tokens then count as computed, except the prompt's last one: its logits are needed.
        """
        state = self._requests[request].state
        if state.is_loading:
            return False
        request.num_loaded = request.num_computed = min(state.end_load(), request.num_prompt - 1)
        request.miss_reason = _value_of(state.reason)
        return True

    def lost(self, request: Request) -> str | None:
        """Returns why a hand-off fell short, if PDSTORE_ON_MISS says that its request must fail."""
        tracked = self._requests.get(request)
        if tracked is not None:
            return _value_of(tracked.state.failure)
        is_handed_over = "pdstore" in (request.kv_transfer_params or {})
        return request.miss_reason if is_handed_over and self._settings.on_miss == "fail" else None

    @contextlib.contextmanager
    def saving(self, chunks: Sequence[Chunk]) -> Iterator[Callable[[int], None]]:
        """Saves the KV of prompts that a step in here computes; a last chunk publishes its prompt.

        Yields the `layer_written` of `Step`: the blocks of a layer range are stored as soon as its
        last layer is written, while the model computes the next ones. If the step fails, so do its
        saves.
        """
        saves: dict[Request, pdstore.OpenSave] = {}
        for chunk in chunks:
            with self._degrading(chunk.request):
                if (plan := self._planned(chunk)) is not None:
                    saves[chunk.request] = self._begin_save(chunk.request, plan)

        def layer_written(layer: int) -> None:
            for request, save in saves.items():
                with self._degrading(request), _cancelling(save.job):
                    save.layers_done(layer + 1)

        with contextlib.ExitStack() as failing:
            for save in saves.values():
                failing.enter_context(_cancelling(save.job))
            yield layer_written
        for chunk in chunks:
            tracked = self._requests.get(chunk.request)
            if tracked is not None and chunk.stop >= tracked.state.keys.num_tokens:
                tracked.state.end_prompt()
                self._keep_in_answer(chunk)

    def end(self, request: Request) -> None:
        """Cancels the lookup and the load of a request that has ended, if they still run.

        D is told of a hand-off that nothing publishes. The blocks that the answer has filled are
        saved.
        """
        tracked = self._requests.get(request)
        if tracked is None:
            return
        with self._degrading(request):
            if len(request.token_ids) > request.num_prompt:
                stop = len(request.token_ids) - 1  # the last token has no KV
                if self._states is not None:
                    stop = max(_kept_in_answer(request), default=0)
                plan = tracked.state.plan_answer_save(stop, request.token_ids)
                if plan is not None:
                    save = self._begin_save(request, plan)
                    save.layers_done(len(self.pool.layout.held_layers))
            aborted = tracked.state.end()
            self._records.end_request(tracked.state)
            request.answer_params = tracked.state.answer or None
            request.decided = tracked.state.decided
            if tracked.load is not None:
                tracked.load.cancel()
            if aborted is not None:
                self.pool.abort_handoff(aborted)

    def is_done(self, request: Request) -> bool:
        """True if no job reads or writes the request's blocks: they may be given back."""
        tracked = self._requests.get(request)
        if tracked is None:
            return True
        is_done = all(job.done for job in (tracked.load, tracked.publish) if job is not None)
        if not (is_done and all(job.captured for job in tracked.saves)):
            return False
        del self._requests[request]
        return True

    def close(self) -> None:
        """Gives running jobs the drain time, then ends them. May be called twice."""
        self.pool.close()
        self.cache.close()
        self._records.close()
        self.reporting.close()

    def _planned(self, chunk: Chunk) -> pdstore.SavePlan | None:
        """Returns the save of the blocks that a chunk completes; None if there are none."""
        tracked = self._requests.get(chunk.request)
        if tracked is None:
            return None
        tracked.state.begin_step(chunk.start, chunk.stop)
        plan = tracked.state.plan_save(chunk.start, chunk.stop, [chunk.stop])
        if self._states is not None and plan is not None and plan.keys.num_tokens == chunk.stop:
            self._states.keep(chunk.request, chunk.stop)
        return plan

    def _leaves_last_token(self, request: Request, asked: pdstore.TransferParams) -> bool:
        """Returns whether D alone computes a prompt's last token.

        D computes it in any case, and no engine can take it out of a state again.
        """
        is_p = self._states is not None and self.cache.is_prefill(asked)
        return is_p and request.num_prompt > 1 and not asked.keeps_last_token

    def _keep_in_answer(self, chunk: Chunk) -> None:
        """Keeps the state at the last block's end that the answer has reached: `end` saves it."""
        request, stop = chunk.request, chunk.stop
        if self._states is None or not self._settings.save_decoded:
            return
        if stop > request.num_prompt and stop % self.pool.layout.block_tokens == 0:
            for earlier in _kept_in_answer(request):
                self._states.drop(request, earlier)
            self._states.keep(request, stop)

    def _tables_of(
        self, request: Request, states: dict[int, int]
    ) -> list[list[int] | dict[int, int]]:
        """Returns a request's blocks, and these states of it by the tokens that they cover."""
        if self._states is None:
            return [request.block_ids]
        return [request.block_ids, states]

    def _begin_save(self, request: Request, plan: pdstore.SavePlan) -> pdstore.OpenSave:
        tracked = self._requests[request]
        with self._recording(tracked.state, pdstore.Direction.SAVE, plan.handoff):
            kept = {n: request.states[n] for n in request.states if n <= plan.keys.num_tokens}
            tables = self._tables_of(request, kept)
            save = self.pool.begin_save(plan, tables, after=tuple(tracked.saves))
        if plan.handoff is not None:
            tracked.publish = save.job
        tracked.saves.append(save.job)
        self._record_end(tracked.state, save.job, len(tracked.saves))
        return save

    @contextlib.contextmanager
    def _recording(
        self,
        state: pdstore.EngineRequest,
        direction: pdstore.Direction,
        handoff: pdstore.HandoffId | None = None,
    ) -> Iterator[None]:
        """Records a job that cannot begin, and tells D of a hand-off that it would publish."""
        try:
            yield
        except Exception:
            self._records.job_ended(state, pdstore.JobEnd.fault(direction))
            if handoff is not None:
                self.pool.abort_handoff(handoff)
            raise

    def _record_end(
        self, state: pdstore.EngineRequest, job: pdstore.Job, number: int | None = None
    ) -> None:
        """Has the end of a job put in the request's record, whichever thread it comes on."""
        job.on_end(
            lambda job: self._records.job_ended(state, pdstore.JobEnd.of_job(job, "", number))
        )

    @contextlib.contextmanager
    def _degrading(self, request: Request) -> Iterator[None]:
        try:
            yield
        except pdstore.IllegalCall:  # a defect of this engine
            raise
        except Exception:  # the border with pdstore: a fault is a miss
            log.exception("pdstore failed for a request, which goes on without it")
            self._metrics.miss(pdstore.Reason.FAULT)
            request.miss_reason = pdstore.Reason.FAULT.value
            if (tracked := self._requests.get(request)) is not None:
                tracked.state.give_up()


def _layout_of(config: Config, model: Model, cache: PagedCache) -> pdstore.Layout:
    layer = pdstore.LayerSpec(
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        scales="float32" if config.is_quantized else None,
    )
    layers = [layer] * model.num_layers
    if cache.states is not None:
        num_bytes = cache.states.rows[0].nbytes
        layers.append(pdstore.LayerSpec.state(num_bytes, FORM, table=1))
    quantization = f"{config.dtype} as int8, with a scale for each token and head"
    return pdstore.Layout.of(
        config.settings,
        dtype="int8" if config.is_quantized else config.dtype,
        layers=layers,
        engine_block_tokens=config.block_size,
        rope=model.rope,
        quantization=quantization if config.is_quantized else None,
    )


def _kept_in_answer(request: Request) -> list[int]:
    """Returns the ends, behind the prompt, at which a request's state is kept."""
    return [end for end in request.states if end > request.num_prompt]


def _value_of(reason: pdstore.Reason | None) -> str | None:
    return reason.value if reason is not None else None


@contextlib.contextmanager
def _cancelling(job: pdstore.Job) -> Iterator[None]:
    """Cancels a job if the code in here fails."""
    try:
        yield
    except BaseException:
        job.cancel()
        raise
