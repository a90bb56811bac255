"""PromptTimes: decides which part of a prompt is loaded and which is computed."""

# Decision: docs/decisions/015-load-or-compute.md
from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pdstore.format.keys import Namespace
from pdstore.metrics import Metrics
from pdstore.settings import Settings

Mode: TypeAlias = Literal["auto", "never"]
Way: TypeAlias = Literal["load", "compute", "both", "none"]

_KEEP = 0.8  # each new measurement multiplies the weight of all earlier ones by this
_MIN_TOKENS = 512  # fewer tokens would measure the cost of a step or call, not of a token
_PROBE_PART = 8


class CostAverage:
    """Moving average of the seconds that a token takes; older measurements weigh less."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add_sample(self, num_tokens: float, seconds: float) -> None:
        """Adds a measurement to the average; ignores one of fewer than 512 tokens."""
        if num_tokens >= _MIN_TOKENS and seconds > 0.0:
            self._tokens = self._tokens * _KEEP + num_tokens
            self._seconds = self._seconds * _KEEP + seconds

    @property
    def per_token_s(self) -> float | None:
        """Seconds that a token takes; None before the first measurement."""
        return self._seconds / self._tokens if self._tokens else None


class Decision(NamedTuple):
    """The part of a prompt that is loaded.

    num_tokens: how many leading tokens of the prompt the engine has after the load.
    way: `load`: all tokens that were found are loaded; `compute`: none of them; `both`: only the
      first of them. `none`: no tokens were found.
    """

    num_tokens: int
    way: Way


@dataclass
class _Prompt:
    """A prompt whose KV the engine does not have completely yet.

    at: the number of the first token that has to be computed.
    num_loading: how many of its tokens are being loaded.
    """

    num_tokens: int
    at: int
    way: Way
    decided_at: float
    num_loading: int


class PromptTimes:
    """Decides which part of each prompt is loaded, by the measured times to load and to compute.

    - `auto` compares the times to load and to compute what was found, each behind all tokens that
      wait for the same, and favours the cheaper way. Until both times are measured, the first
      prompt is loaded, and later ones are loaded or computed to measure both.
    - While `auto` computes all prompts, one request in `probe_every` still loads the first part of
      what was found, to notice if the store has become fast.
    - `never` computes all prompts. With PDSTORE_LOAD=always there is no PromptTimes.

    Steps may overlap, so the time of one step cannot be measured. But a request gets its first
    token when its prompt is computed. So the time is measured from one request's first token to the
    next request's, and is divided over all prompt tokens whose steps began in that time.

    may_split: True if the first part of what was found may be loaded without the rest. False with
      sliding windows and states: of such layers only what is needed at the end of what was found
      was looked up. A state counts with the tokens that it is loaded with.
    metrics: counts the decisions.
    Only one thread may call it. When a request ends, the caller must call `forget`.
    """

    def __init__(
        self,
        mode: Mode,
        block_tokens: int,
        *,
        may_split: bool = True,
        metrics: Metrics | None = None,
        probe_every: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode = mode
        self._block_tokens = block_tokens
        self._clock = clock
        self._metrics = metrics
        self._may_split = may_split
        self._probe_every = probe_every
        self._num_computed = 0  # consecutive prompts for which computing was quicker
        self._load_cost = CostAverage()
        self._compute_cost = CostAverage()
        self._prompts: dict[Hashable, _Prompt] = {}
        self._is_cold = True
        self._last_load_end = 0.0
        self._most_loading = 0  # maximum number of tokens in loading since the last measurement
        self._num_brought = 0  # tokens loaded since the last measurement
        self._busy_s = 0.0  # seconds in which any load ran since the last measurement
        self._running: set[Hashable] = set()  # requests whose prompts are being computed
        self._num_begun = 0  # prompt tokens given to the model since a prompt was last computed
        self._since = 0.0  # when a prompt was last computed
        self._step_s = 0.0  # time of the last step for few tokens; a loaded prompt needs one, too

    @classmethod
    def from_settings(
        cls, settings: Settings, namespace: Namespace, metrics: Metrics
    ) -> PromptTimes | None:
        """Returns a PromptTimes; None if PDSTORE_LOAD is `always`, because nothing is decided."""
        if settings.load == "always":
            return None
        may_split = namespace.continuation.needs_all
        return cls(settings.load, namespace.block_tokens, may_split=may_split, metrics=metrics)

    def decide(self, name: Hashable, *, start: int, found: int, num_tokens: int) -> Decision:
        """Decides how much of a prompt is loaded.

        name: the request's name; a second call for a request replaces the first decision. The load
          counts as running from this call until `load_ended`.
        start: how many leading tokens of the prompt the engine has.
        found: how many leading tokens the pool has.
        """
        self._prompts.pop(name, None)
        num_loading = self._num_loading()
        end = start
        if self._mode == "auto" and found > start:
            end = self._end_of_load(start, found, num_loading)
        way: Way = "compute" if end <= start else "load" if end == found else "both"
        way = "none" if found <= start else way
        self._prompts[name] = _Prompt(num_tokens, end, way, self._clock(), end - start)
        self._most_loading = max(self._most_loading, num_loading + end - start)
        return Decision(end, way)

    def load_ended(self, name: Hashable, num_present: int, seconds: float) -> None:
        """Records that a load has ended; the engine now has `num_present` leading tokens.

        seconds: how long the load took; not how long it took until the engine saw its end.

        Loads share the store's rate, so those that run at the same time make one measurement. The
        first measurement is not used: it opens connections, and touches memory for the first time.
        """
        prompt = self._prompts.get(name)
        if prompt is None or not prompt.num_loading:
            return
        ended_at = prompt.decided_at + seconds
        self._busy_s += max(0.0, min(seconds, ended_at - self._last_load_end))
        self._last_load_end = max(self._last_load_end, ended_at)
        self._num_brought += prompt.num_loading - max(0, prompt.at - num_present)
        prompt.num_loading = 0
        prompt.at = num_present
        num_left = self._num_loading()
        if num_left and self._num_brought < self._most_loading:
            return
        if prompt.way == "both":
            self._load_cost = CostAverage()  # a probe's measurement replaces all earlier ones
        if not self._is_cold:
            self._load_cost.add_sample(self._num_brought, self._busy_s)
        self._is_cold = False
        self._most_loading = num_left
        self._num_brought = 0
        self._busy_s = 0.0

    def begin_step(self, name: Hashable, start: int, stop: int) -> None:
        """Records that a step begins to compute tokens `start` to `stop` - 1 of a prompt."""
        if not self._running:
            self._since = self._clock()
            self._num_begun = 0
        self._running.add(name)
        self._num_begun += stop - start
        if (prompt := self._prompts.get(name)) is not None:
            prompt.at = stop

    def end_prompt(self, name: Hashable) -> None:
        """Records that a prompt is computed; this ends a measurement of the time to compute."""
        if name not in self._running:
            return
        self._running.remove(name)
        now = self._clock()
        if 0 < self._num_begun < _MIN_TOKENS:
            self._step_s = now - self._since
        self._compute_cost.add_sample(self._num_begun, now - self._since)
        self._num_begun = 0
        self._since = now
        prompt = self._prompts.pop(name, None)
        if prompt is not None and prompt.way != "none" and self._metrics is not None:
            self._metrics.decisions.labels(prompt.way).inc()

    def forget(self, name: Hashable) -> None:
        """Forgets the prompt of a request that has ended, even if it was not computed."""
        self._prompts.pop(name, None)
        self._running.discard(name)

    def _num_loading(self) -> int:
        """Returns how many tokens of all prompts are being loaded."""
        return sum(prompt.num_loading for prompt in self._prompts.values())

    def _end_of_load(self, start: int, found: int, num_loading: int) -> int:
        """Returns where the load ends: at `start` (no load), at `found`, or between for a probe."""
        backlog = sum(prompt.num_tokens - prompt.at for prompt in self._prompts.values())
        num_own = found - start
        load_s = self._load_cost.per_token_s
        compute_s = self._compute_cost.per_token_s
        if load_s is None and compute_s is None:
            return found if num_loading <= backlog else start
        if load_s is None:
            return start if num_loading else found
        if compute_s is None:
            return found if backlog >= _MIN_TOKENS else start
        ratio = load_s / compute_s
        loading_s = load_s * (num_loading + num_own) * min(ratio, ratio**2) + self._step_s
        if loading_s <= compute_s * (backlog + num_own):
            self._num_computed = 0
            return found
        self._num_computed += 1
        if self._num_computed % self._probe_every:
            return start
        end = start + max(_MIN_TOKENS, num_own // _PROBE_PART)
        end -= end % self._block_tokens
        return end if self._may_split and start < end < found else found
