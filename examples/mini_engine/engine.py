"""Engine: the loop that answers requests, in its own thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from queue import Empty, SimpleQueue

import torch

from examples.mini_engine.adapter import Adapter
from examples.mini_engine.attention import Chunk
from examples.mini_engine.config import Config
from examples.mini_engine.counters import Counters
from examples.mini_engine.model import Model
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Finish, Request, State, Token
from examples.mini_engine.scheduler import Scheduler
from examples.mini_engine.state import StateCache

log = logging.getLogger(__name__)

_POLL_S = 0.001
_IDLE_S = 0.5
_STOP_S = 5.0
_SWITCH_IS_OFF = (
    "a request comes with a hand-off of another instance, and pdstore is off here, so its prompt is"
    " computed again: start this instance with PD_TRANSFER_VIA_STORAGE=1"
)


class EngineError(RuntimeError):
    """Raised where the engine takes no requests; the message gives the reason."""


class Engine:
    """Answers requests. Any thread may call `submit`, `abort`, `drain` and `stop`."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self.model = Model(config)
        self.cache = PagedCache(
            self.model.num_layers,
            self.model.num_kv_heads,
            self.model.head_dim,
            config.num_blocks,
            config.block_size,
            getattr(torch, config.dtype),
            config.device,
            _states_of(config, self.model),
            is_quantized=config.is_quantized,
        )
        self.counters = Counters()
        self.adapter: Adapter | None = None
        if config.settings.pd_transfer_via_storage:
            self.adapter = Adapter(config, self.model, self.cache, self.counters.pdstore)
        self.scheduler = Scheduler(config, self.cache, self.adapter)
        self.error: str | None = None  # why the loop has ended; then no request is taken
        self._ending = threading.Lock()
        self._told_of_switch = False
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="mini-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while the engine's thread is alive."""
        return self._thread.is_alive()

    def ready(self) -> None:
        """Waits until the pool's memory is pinned. Raises SwapError or TimeoutError."""
        if self.adapter:
            self.adapter.ready()

    @property
    def problem(self) -> str | None:
        """The trouble of the pool, without which requests are computed; None while it is well."""
        return self.adapter.problem if self.adapter else None

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that could never be answered."""
        num_tokens = request.num_prompt + request.max_tokens
        asked = f"{request.num_prompt} prompt tokens and max_tokens={request.max_tokens}"
        if num_tokens > self.model.max_model_len:
            role = self.config.settings.role
            who = "this instance" if role == "both" else f"this {role} instance"
            limit = f"the context of {self.model.max_model_len} tokens of {who}"
            raise ValueError(f"{asked} are over {limit}: give P and D the same --max-model-len")
        room = self.cache.num_blocks * self.cache.block_size
        if num_tokens > room:
            raise ValueError(f"{asked} are over the KV cache of {room} tokens")
        if self.adapter:
            self.adapter.check(request)
        elif (request.kv_transfer_params or {}).get("pdstore") and not self._told_of_switch:
            self._told_of_switch = True
            log.warning("%s", _SWITCH_IS_OFF)

    def room_behind(self, num_tokens: int) -> int:
        """Returns how many tokens can follow a prompt of so many, at least 1."""
        room = self.cache.num_blocks * self.cache.block_size
        return max(1, min(self.model.max_model_len, room) - num_tokens)

    def submit(self, request: Request) -> None:
        """Takes a request that passed `check`. Raises EngineError after `drain`."""
        with self._ending:
            if self.error is not None or self._stop_at is not None:
                raise EngineError(self.error or "the engine is stopping")
            self._inbox.put(request)

    def abort(self, request: Request) -> None:
        """Ends a request early. Does nothing if it has ended."""
        request.is_aborted = True
        self._inbox.put(None)

    def drain(self) -> None:
        """Takes no more requests and gives the running ones the drain time. Returns at once."""
        self._stop_at = self._stop_at or time.monotonic() + self.config.settings.drain_s
        self._inbox.put(None)

    def stop(self) -> None:
        """Drains, then waits for the thread to end; the drain and the last saves are bounded."""
        self.drain()
        self._thread.join(2 * self.config.settings.drain_s + _STOP_S)

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
            self._end("the engine was stopped")
        except Exception as error:  # whatever it was, clients get it as their error
            log.exception("the engine's loop ended")
            self._end(f"the engine's loop ended: {error!r}")

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        return time.monotonic() > self._stop_at or not self.scheduler.unfinished()

    def _end(self, error: str) -> None:
        """Ends all requests, waits for their saves, and gives their blocks back."""
        with self._ending:
            self.error = error
        self._take_inbox(wait=False)
        for request in self.scheduler.unfinished():
            self.scheduler.finish(request, Finish("error", error))
        if self.adapter:
            self.adapter.close()
        self.scheduler.give_back()

    def _turn(self) -> None:
        """Takes new requests and the results of jobs, then runs one step of the model."""
        self._take_inbox(wait=not self.scheduler.running)
        self.scheduler.advance()
        chunks = self.scheduler.next_chunks()
        if chunks:
            self._step(chunks)
        self.counters.show(self.scheduler, self.cache)

    def _take_inbox(self, *, wait: bool) -> None:
        pause = _POLL_S if self.scheduler.is_waiting_for_jobs() else _IDLE_S
        with contextlib.suppress(Empty):
            request = self._inbox.get(wait, pause)
            while True:
                if request is not None:
                    self.scheduler.add(request)
                request = self._inbox.get_nowait()

    def _step(self, chunks: list[Chunk]) -> None:
        try:
            logits = self._forward(chunks)
            tokens = iter(_choose(logits, [c.request for c in chunks if c.is_last]))
        except Exception as error:  # ends these requests, not the engine
            log.exception("a step failed")
            for chunk in chunks:
                self.scheduler.finish(chunk.request, Finish("error", repr(error)))
            return
        for chunk in chunks:
            request = chunk.request
            request.num_computed = chunk.stop
            self.counters.computed.inc(chunk.num_tokens)
            if chunk.is_last:
                self._take_token(request, next(tokens))

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        if self.adapter is None:
            return self.model.forward(chunks, self.cache)
        with self.adapter.saving(chunks) as layer_written:
            return self.model.forward(chunks, self.cache, layer_written)

    def _take_token(self, request: Request, token: Token) -> None:
        request.state = State.DECODE
        request.token_ids.append(token.id)
        self.counters.generated.inc()
        request.sink(token)
        if token.id in self.model.end_ids and not request.ignore_eos:
            self.scheduler.finish(request, Finish("stop"))
        elif len(request.output_ids) == request.max_tokens:
            self.scheduler.finish(request, Finish("length"))


def _states_of(config: Config, model: Model) -> StateCache | None:
    if not config.state:
        return None
    return StateCache(2 * config.num_blocks, model.width, config.device)


def _choose(logits: torch.Tensor, requests: list[Request]) -> list[Token]:
    """Returns the likeliest token of each row of logits, with its logprob."""
    if not requests:
        return []
    logprobs = logits.log_softmax(dim=-1)
    num_top = max(1, *(request.num_logprobs or 1 for request in requests))
    values, ids = logprobs.topk(num_top, dim=-1)
    return [
        Token(ids[0], values[0], list(zip(ids, values, strict=True))[: request.num_logprobs or 0])
        for request, values, ids in zip(requests, values.tolist(), ids.tolist(), strict=True)
    ]
