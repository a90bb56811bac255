"""Scheduler: chooses the requests that run and the tokens that are computed next."""

from __future__ import annotations

from collections import deque
from itertools import islice

from examples.mini_engine.adapter import Adapter
from examples.mini_engine.attention import Chunk
from examples.mini_engine.config import Config
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Finish, Request, State


class Scheduler:
    """Moves requests through their states. Called by the engine's thread only; never waits.

    A request gets the blocks of its whole prompt and answer at once, so none is ever preempted.
    """

    def __init__(self, config: Config, cache: PagedCache, adapter: Adapter | None) -> None:
        self._max_seqs = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self._cache = cache
        self._block_tokens = config.settings.block_tokens
        self._adapter = adapter
        self.waiting: deque[Request] = deque()  # WAITING or LOOKING_UP, in order of arrival
        self.loading: list[Request] = []
        self.running: list[Request] = []  # PREFILL or DECODE
        self.leaving: list[Request] = []  # FINISHED, with blocks that a job may still use

    def is_waiting_for_jobs(self) -> bool:
        """True if a lookup or a job can end: the loop then polls instead of sleeping."""
        return bool(self.waiting or self.loading or self.leaving)

    def unfinished(self) -> list[Request]:
        return [*self.waiting, *self.loading, *self.running]

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        if self._cache.states is not None:
            # A state can be saved only where a step ends. The last token has a step of its own, so
            # that it is computed alike whether the tokens before it were loaded or computed.
            last = request.num_prompt - 1
            request.chunk_ends |= {last - last % self._block_tokens, last}

    def advance(self) -> None:
        """Handles aborts, lookups, admission, and the ends of loads and saves."""
        for request in self.unfinished():
            if request.is_aborted:
                self.finish(request, Finish("abort"))
        self._look_up()
        self._admit()
        self._take_loaded()
        self.give_back()

    def next_chunks(self) -> list[Chunk]:
        """Returns the chunks of the next step, within the token budget.

        One token of each running answer comes first, then prompts in order of arrival.
        """
        chunks: list[Chunk] = []
        budget = self._max_tokens
        for request in sorted(self.running, key=lambda r: r.state is State.PREFILL):
            start = request.num_computed
            ends = (end for end in request.chunk_ends if end > start)
            stop = min(start + budget, len(request.token_ids), *ends)
            if start < stop:
                chunks.append(Chunk(request, start, stop))
                budget -= stop - start
        return chunks

    def finish(self, request: Request, finish: Finish) -> None:
        """Ends a request in any state. `give_back` frees its blocks when no job uses them."""
        for place in (self.waiting, self.loading, self.running):
            if request in place:
                place.remove(request)
        request.state = State.FINISHED
        if self._adapter:
            self._adapter.end(request)
        self.leaving.append(request)
        request.sink(finish)

    def give_back(self) -> None:
        """Frees the blocks of finished requests that no job uses any more."""
        for request in list(self.leaving):
            if self._adapter is None or self._adapter.is_done(request):
                self.leaving.remove(request)
                self._cache.free(request.block_ids)
                if self._cache.states is not None and request.block_ids:
                    self._cache.states.give_back(request)
                request.block_ids = []

    def _look_up(self) -> None:
        if self._adapter is None:
            return
        for request in islice(self.waiting, self._max_seqs):
            if request.state is State.WAITING:
                request.state = State.LOOKING_UP
                self._adapter.look_up(request)

    def _admit(self) -> None:
        """Admits requests in order of arrival, and skips those that are still being looked up."""
        for request in list(islice(self.waiting, self._max_seqs)):
            if self._adapter and not self._adapter.is_looked_up(request):
                continue
            if self._is_lost(request):
                continue
            if len(self.running) + len(self.loading) >= self._max_seqs:
                return
            num_tokens = request.num_prompt + request.max_tokens
            block_ids = self._cache.allocate(self._cache.blocks_for(num_tokens))
            if block_ids is None:
                return
            request.block_ids = block_ids
            if self._cache.states is not None:
                self._cache.states.admit(request)
            self.waiting.remove(request)
            if self._adapter and self._adapter.load(request):
                request.state = State.LOADING
                self.loading.append(request)
            else:
                self._run(request)

    def _take_loaded(self) -> None:
        for request in list(self.loading):
            if self._adapter and self._adapter.is_loaded(request):
                self.loading.remove(request)
                self._run(request)

    def _is_lost(self, request: Request) -> bool:
        """Ends a request that must not be computed because its hand-off fell short."""
        reason = self._adapter.lost(request) if self._adapter else None
        if reason is None:
            return False
        self.finish(request, Finish("error", f"the hand-off fell short: {reason}", reason))
        return True

    def _run(self, request: Request) -> None:
        if not self._is_lost(request):
            request.state = State.PREFILL
            self.running.append(request)
