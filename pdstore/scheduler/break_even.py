"""PromptTimes: decides which part of a prompt is loaded and which is computed."""

# Decision: docs/decisions/015-load-or-compute.md
from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pdstore.format.keys import Namespace
from pdstore.metrics import Metrics
from pdstore.settings import Settings

Mode: TypeAlias = Literal["auto", "always", "never"]
Way: TypeAlias = Literal["load", "compute", "both", "none"]
Clock: TypeAlias = Callable[[], float]

_KEEP = 0.8  # of an average's weight at each new measurement
_STALE_S = 30.0
_FEWEST_TOKENS = 16  # of a prompt in a step: fewer tell what a step costs, not what a token does
_SPLITS = 8
_PREFER_LOADING = 1.02
_MOST_WRONG = 3.0  # how much too high the cost of a token may look that the end of a prompt shows


class CostAverage:
    """Seconds for each token as measured lately: the older a measurement, the lighter.

    stale_s: measurements that are older than the latest one by so much count no more.
    """

    def __init__(self, clock: Clock = time.monotonic, stale_s: float = math.inf) -> None:
        self._clock = clock
        self._stale_s = stale_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._at = clock()

    def add_sample(self, num_tokens: float, seconds: float) -> None:
        """Takes up a measurement."""
        now = self._clock()
        keep = _KEEP if now - self._at <= self._stale_s else 0.0
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds
        self._at = now

    def estimate_s(self, num_tokens: float) -> float | None:
        """Returns the seconds that so many tokens take; None before any measurement."""
        return self._seconds / self._tokens * num_tokens if self._tokens > 0 else None


class Decision(NamedTuple):
    """The part of a prompt that is loaded, and why.

    num_tokens: leading tokens of the prompt that are there when the load has ended.
    way: `load` for all that was found, `compute` for nothing of it, `both` for the front of it;
      `none` if nothing was found.
    load_s, compute_s: estimated seconds until the prompt's KV is there if all that was found is
      loaded, and if nothing is; None if that is not known.
    """

    num_tokens: int
    way: Way
    load_s: float | None
    compute_s: float | None


@dataclass
class _Prompt:
    """A prompt whose KV is not all there.

    at: the first token that has to be computed.
    num_loading: tokens that are being loaded.
    num_beside: the most tokens that were being loaded at once, as seen at the load's two ends.
    follows: the load waits for P.
    """

    num_tokens: int
    at: int
    way: Way
    decided_at: float
    num_loading: int
    num_beside: int
    follows: bool
    num_computed: int = 0


class PromptTimes:
    """Decides what is loaded, by what prompts cost to load and to compute. Made once for an engine.

    - `auto` loads as long as nothing is known of the store. As long as nothing is known of the
      prefill, it leaves the last eighth of a hit to be computed, to learn that; and it computes a
      prompt once that is over twice as long as any computed before, if that may be quicker.
    - While it computes everything, one request in `probe_every` loads an eighth of what was found,
      to notice a store that has become fast.
    - `never` and `always` estimate nothing. An engine that always loads has none of this.

    An engine may begin a step before the one before it has ended. But a request has its first token
    only when its prompt is computed. So the time is cut there, and each part of it belongs to all
    tokens of prompts that were scheduled in it.

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
        probe_every: int = 128,
        clock: Clock = time.monotonic,
    ) -> None:
        self._mode = mode
        self._block_tokens = block_tokens
        self._clock = clock
        self._metrics = metrics
        self._may_split = may_split
        self._probe_every = probe_every
        self._num_computed = 0  # prompts in a row
        self._load_cost = CostAverage(clock, _STALE_S)
        self._compute_cost = CostAverage(clock)
        self._prompts: dict[Hashable, _Prompt] = {}
        self._first_load_end: float | None = None
        self._most_computed = 0  # tokens of one prompt
        self._learning: Hashable = None  # the prompt that is computed to learn what that costs
        self._last_computed: Hashable = None  # the prompt that was counted last
        self._running: set[Hashable] = set()  # whose prompt is being computed
        self._chunks: list[tuple[Hashable, int, int]] = []  # that ran since the last prompt's end
        self._since = 0.0

    @classmethod
    def from_settings(
        cls, settings: Settings, namespace: Namespace, metrics: Metrics
    ) -> PromptTimes | None:
        """Returns one for the engine's KV cache; None where nothing is decided: all is loaded."""
        if settings.load == "always":
            return None
        may_split = not namespace.windows
        return cls(settings.load, namespace.block_tokens, may_split=may_split, metrics=metrics)

    def decide(
        self,
        name: Hashable,
        *,
        start: int,
        found: int,
        num_tokens: int,
        follows: bool = False,
        is_preempted: bool = False,
    ) -> Decision:
        """Decides for a prompt of which the engine has `start` tokens and the pool `found`.

        name: of the request; asked again, it is decided anew. A load counts as begun from now on,
          until `load_ended`.
        follows: the load would follow a hand-off. It waits for P, so its time tells no cost.
        is_preempted: nobody tells when it is all computed again, so it holds up no other prompt.
        """
        if self._mode == "always":
            return Decision(max(start, found), _way(start, found, found), None, None)
        self._prompts.pop(name, None)
        load_s = compute_s = end = None
        if self._mode == "auto":
            load_s = self._load_cost.estimate_s(self._num_loading() + max(0, found - start))
            backlog = sum(prompt.num_tokens - prompt.at for prompt in self._prompts.values())
            compute_s = self._compute_cost.estimate_s(backlog + num_tokens - start)
            end = self._to_learn(name, start, found, num_tokens)
            if end is None:
                end = self._quicker(name, start, found, load_s, compute_s)
        end = start if end is None else end
        decision = Decision(end, _way(start, end, found), load_s, compute_s)
        if not is_preempted:
            num_beside = self._num_loading() + end - start
            self._prompts[name] = _Prompt(
                num_tokens, end, decision.way, self._clock(), end - start, num_beside, follows
            )
        return decision

    def load_ended(self, name: Hashable, num_present: int) -> None:
        """Takes up the end of a load: so many leading tokens of the prompt are there now."""
        prompt = self._prompts.get(name)
        if prompt is not None and prompt.num_loading:
            num_brought = prompt.num_loading - max(0, prompt.at - num_present)
            if not prompt.follows:
                self._measure_load(prompt, num_brought)
            prompt.num_loading = 0
            prompt.at = num_present

    def begin_step(self, name: Hashable, start: int, stop: int) -> None:
        """Adds the tokens of a prompt that a step computes."""
        if not self._running:
            self._since = self._clock()
        self._running.add(name)
        self._chunks.append((name, start, stop))

    def end_prompt(self, name: Hashable) -> None:
        """Ends a prompt that is computed, and with it the time of all that ran since the last."""
        if name not in self._running:
            return
        self._running.remove(name)
        chunks, since = self._chunks, self._since
        self._chunks = []
        self._since = self._clock()
        if chunks:  # else its own were counted with another prompt's end
            self.computed(chunks, self._since - since)

    def computed(self, chunks: Sequence[tuple[Hashable, int, int]], seconds: float) -> None:
        """Takes up a step of the engine: the tokens start..stop of prompts, and its time."""
        sizes = [stop - start for _, start, stop in chunks]
        num_tokens = sum(size for size in sizes if size >= _FEWEST_TOKENS)
        if num_tokens:
            self._compute_cost.add_sample(num_tokens, seconds)
        for name, start, stop in chunks:
            prompt = self._prompts.get(name)
            if prompt is None:
                continue
            prompt.num_computed += stop - start
            prompt.at = max(prompt.at, stop)
            if prompt.at >= prompt.num_tokens:
                self._end(name)

    def forget(self, name: Hashable) -> None:
        """Forgets a prompt: its request has ended, however far it came."""
        self._prompts.pop(name, None)
        self._running.discard(name)
        self._chunks = [chunk for chunk in self._chunks if chunk[0] != name]

    def _num_loading(self) -> int:
        """Returns how many tokens the store has to bring; a load that follows waits for P."""
        return sum(p.num_loading for p in self._prompts.values() if not p.follows)

    def _measure_load(self, prompt: _Prompt, num_brought: int) -> None:
        """Takes up a load: in its time the store brought what was loaded beside it, too.

        The loads that began before any had ended made connections and wrote memory for the first
        time: they are not counted.
        """
        now = self._clock()
        num_tokens, seconds = max(prompt.num_beside, self._num_loading()), now - prompt.decided_at
        is_warm = self._first_load_end is not None and prompt.decided_at >= self._first_load_end
        if num_brought > 0 and seconds and is_warm:
            self._load_cost.add_sample(num_tokens * num_brought / prompt.num_loading, seconds)
        if self._first_load_end is None:
            self._first_load_end = now

    def _end(self, name: Hashable) -> None:
        """Ends a prompt whose KV is all there now."""
        prompt = self._prompts.pop(name)
        self._most_computed = max(self._most_computed, prompt.num_computed)
        if prompt.way != "none" and self._metrics is not None:
            self._metrics.decisions.labels(prompt.way).inc()

    def _to_learn(self, name: Hashable, start: int, found: int, num_tokens: int) -> int | None:
        """Returns the end of a load that leaves enough to compute to learn its cost, or None."""
        load_s = self._load_cost.estimate_s(found - start)
        num_new = num_tokens - start
        is_known = 2 * self._most_computed >= num_new or found <= start
        if load_s is None or is_known or self._learning in self._prompts:
            return None
        compute_s = self._compute_cost.estimate_s(num_new)
        if compute_s is not None and compute_s >= _MOST_WRONG * load_s:
            return None
        self._learning = name
        return self._part(start, found, _SPLITS - 1, start) if compute_s is None else start

    def _quicker(
        self, name: Hashable, start: int, found: int, load_s: float | None, compute_s: float | None
    ) -> int:
        """Returns the end of the load that is quicker than computing; once in a while of a part."""
        if found <= start:
            return start
        if load_s is None or compute_s is None or load_s <= _PREFER_LOADING * compute_s:
            self._num_computed = 0
            return found
        if name != self._last_computed:  # an engine without room asks for the same one again
            self._last_computed = name
            self._num_computed = self._num_computed % self._probe_every + 1
        is_probe = self._num_computed >= self._probe_every
        return self._part(start, found, 1, found) if is_probe else start

    def _part(self, start: int, found: int, eighths: int, otherwise: int) -> int:
        """Returns the end of so many eighths of what was found, in whole blocks."""
        end = start + (found - start) * eighths // _SPLITS
        end -= end % self._block_tokens
        return end if self._may_split and start < end < found else otherwise


def _way(start: int, end: int, found: int) -> Way:
    if found <= start:
        return "none"
    return "compute" if end <= start else "load" if end == found else "both"
