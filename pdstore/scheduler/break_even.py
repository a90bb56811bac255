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
Clock: TypeAlias = Callable[[], float]

_KEEP = 0.8  # of an average's weight at each new measurement
_FEWEST_TOKENS = 512  # fewer tell what a step or a call costs, not what a token does
_PROBE_PART = 8


class CostAverage:
    """Seconds for each token as measured lately: the older a measurement, the lighter."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add_sample(self, num_tokens: float, seconds: float) -> None:
        """Takes up a measurement, unless it is of too few tokens."""
        if num_tokens >= _FEWEST_TOKENS and seconds > 0.0:
            self._tokens = self._tokens * _KEEP + num_tokens
            self._seconds = self._seconds * _KEEP + seconds

    @property
    def per_token_s(self) -> float | None:
        """Seconds that a token takes; None before any measurement."""
        return self._seconds / self._tokens if self._tokens else None


class Decision(NamedTuple):
    """The part of a prompt that is loaded.

    num_tokens: leading tokens of the prompt that are there when the load has ended.
    way: `load` for all that was found, `compute` for nothing of it, `both` for the front of it;
      `none` if nothing was found.
    """

    num_tokens: int
    way: Way


@dataclass
class _Prompt:
    """A prompt whose KV is not all there.

    at: the first token that has to be computed.
    num_loading: tokens that are being loaded.
    """

    num_tokens: int
    at: int
    way: Way
    decided_at: float
    num_loading: int


class PromptTimes:
    """Decides what is loaded, by what prompts cost to load and to compute. Made once for an engine.

    - `auto` compares the time of all that is being loaded and what was found with the time of all
      that waits to be computed and what was found. The times of loads are weighted by what a token
      costs to load, in terms of computing it: what goes a slow way delays what comes behind it.
      A way that was not measured yet is tried by one prompt, loading first.
    - While it computes everything, one request in `probe_every` loads the front of what was found,
      to notice a store that has become fast.
    - `never` computes all. An engine that always loads has none of this.

    An engine may begin a step before the one before it has ended. But a request has its first token
    only when its prompt is computed. So the time is cut there, and each part of it belongs to all
    tokens of prompts whose steps began in it.

    may_split: the front of what was found may be loaded alone; a sliding window forbids it, because
      only the blocks before its end were looked for.
    metrics: counts decisions.
    For one thread. Every prompt that was decided is `forget`ed at its request's end.
    """

    def __init__(
        self,
        mode: Mode,
        block_tokens: int,
        *,
        may_split: bool = True,
        metrics: Metrics | None = None,
        probe_every: int = 256,
        clock: Clock = time.monotonic,
    ) -> None:
        self._mode = mode
        self._block_tokens = block_tokens
        self._clock = clock
        self._metrics = metrics
        self._may_split = may_split
        self._probe_every = probe_every
        self._num_computed = 0  # prompts in a row
        self._load_cost = CostAverage()
        self._compute_cost = CostAverage()
        self._prompts: dict[Hashable, _Prompt] = {}
        self._is_cold = True
        self._last_load_end = 0.0
        self._most_loading = 0  # tokens at once since the last measurement of loads
        self._num_brought = 0  # tokens since then
        self._busy_s = 0.0  # in which they were brought
        self._running: set[Hashable] = set()  # whose prompt is being computed
        self._num_begun = 0  # tokens of prompts whose steps began since the last prompt's end
        self._since = 0.0
        self._step_s = 0.0  # of the last step that computed few tokens: a load needs one, too

    @classmethod
    def from_settings(
        cls, settings: Settings, namespace: Namespace, metrics: Metrics
    ) -> PromptTimes | None:
        """Returns one for the engine's KV cache; None where nothing is decided: all is loaded."""
        if settings.load == "always":
            return None
        may_split = not namespace.windows
        return cls(settings.load, namespace.block_tokens, may_split=may_split, metrics=metrics)

    def decide(self, name: Hashable, *, start: int, found: int, num_tokens: int) -> Decision:
        """Decides for a prompt of which the engine has `start` tokens and the pool `found`.

        name: of the request; asked again, it is decided anew. A load counts as begun from now on,
          until `load_ended`.
        """
        self._prompts.pop(name, None)
        num_loading = self._num_loading()
        end = start
        if self._mode == "auto" and found > start:
            end = self._end_of_load(start, found, num_loading)
        way = _way(start, end, found)
        now = self._clock()
        self._prompts[name] = _Prompt(num_tokens, end, way, now, end - start)
        self._most_loading = max(self._most_loading, num_loading + end - start)
        return Decision(end, way)

    def load_ended(self, name: Hashable, num_present: int, seconds: float) -> None:
        """Takes up the end of a load: so many leading tokens of the prompt are there now.

        seconds: that the load took, until it ended, not until the engine saw that.

        A measurement goes on until all is brought that was on its way, because loads share the
        store's rate. The first one does not count: connections are made, and memory is touched for
        the first time.
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
            self._load_cost = CostAverage()  # what a probe shows counts alone
        if not self._is_cold:
            self._load_cost.add_sample(self._num_brought, self._busy_s)
        self._is_cold = False
        self._most_loading = num_left
        self._num_brought = 0
        self._busy_s = 0.0

    def begin_step(self, name: Hashable, start: int, stop: int) -> None:
        """Adds the tokens of a prompt that a step computes."""
        if not self._running:
            self._since = self._clock()
            self._num_begun = 0
        self._running.add(name)
        self._num_begun += stop - start
        if (prompt := self._prompts.get(name)) is not None:
            prompt.at = stop

    def end_prompt(self, name: Hashable) -> None:
        """Ends a prompt that is computed, and with it the time of all that ran since the last."""
        if name not in self._running:
            return
        self._running.remove(name)
        now = self._clock()
        if 0 < self._num_begun < _FEWEST_TOKENS:
            self._step_s = now - self._since
        self._compute_cost.add_sample(self._num_begun, now - self._since)
        self._num_begun = 0
        self._since = now
        prompt = self._prompts.pop(name, None)
        if prompt is not None and prompt.way != "none" and self._metrics is not None:
            self._metrics.decisions.labels(prompt.way).inc()

    def forget(self, name: Hashable) -> None:
        """Forgets a prompt: its request has ended, however far it came."""
        self._prompts.pop(name, None)
        self._running.discard(name)

    def _num_loading(self) -> int:
        """Returns how many tokens the store has to bring."""
        return sum(prompt.num_loading for prompt in self._prompts.values())

    def _end_of_load(self, start: int, found: int, num_loading: int) -> int:
        """Returns the end of the load that is quicker than computing; once in a while of a part."""
        backlog = sum(prompt.num_tokens - prompt.at for prompt in self._prompts.values())
        num_own = found - start
        load_s, compute_s = self._load_cost.per_token_s, self._compute_cost.per_token_s
        if load_s is None and compute_s is None:
            return found if num_loading <= backlog else start
        if load_s is None:
            return start if num_loading else found
        if compute_s is None:
            return found if backlog >= _FEWEST_TOKENS else start
        ratio = load_s / compute_s
        loading_s = load_s * (num_loading + num_own) * min(ratio, ratio**2) + self._step_s
        if loading_s <= compute_s * (backlog + num_own):
            self._num_computed = 0
            return found
        self._num_computed += 1
        if self._num_computed % self._probe_every:
            return start
        end = start + max(_FEWEST_TOKENS, num_own // _PROBE_PART)
        end -= end % self._block_tokens
        return end if self._may_split and start < end < found else found


def _way(start: int, end: int, found: int) -> Way:
    if found <= start:
        return "none"
    return "compute" if end <= start else "load" if end == found else "both"
