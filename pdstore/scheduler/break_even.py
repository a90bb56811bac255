"""BreakEven: decides which part of a prompt is loaded and which is computed."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pdstore.metrics import Metrics
from pdstore.scheduler.rates import Clock, LoadRate, PrefillRate

Mode: TypeAlias = Literal["auto", "always", "never"]
Way: TypeAlias = Literal["load", "compute", "both", "none"]

_SPLITS = 8
_PREFER_LOADING = 1.02
_MOST_WRONG = 3.0  # how much too high an estimate from other positions of a prompt may be


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


class Outcome(NamedTuple):
    """A request's decision, and the seconds from it until the prompt's KV was there."""

    name: Hashable
    decision: Decision
    took_s: float


@dataclass
class _Prompt:
    """A prompt whose KV is not all there: `at` is the first token that has to be computed.

    follows: its load waits for P.
    busy_s: seconds that its load was at work, once that is known.
    """

    num_tokens: int
    at: int
    decision: Decision
    decided_at: float
    num_loading: int = 0
    follows: bool = False
    busy_s: float | None = None


class _Backlog(NamedTuple):
    """Seconds of computing for other prompts: those that are ready now, and those that load."""

    ready_s: float
    after_loads_s: float


class BreakEven:
    """Compares loading with computing for each prompt, by the rates of this instance.

    The engine computes prompts one after the other, and loads run beside that. So a load that ends
    before the engine has time for the prompt costs nothing; a longer one may be worth its front.

    - `auto` loads as long as nothing is known of the store. As long as nothing is known of the
      prefill, it leaves the last eighth of a hit to be computed, to learn that; and it computes a
      prompt once, of a length that it has not computed before, if that may be quicker.
    - While it computes everything, one request in `probe_every` loads an eighth of what was found,
      to notice a store that has become fast.
    - `always` and `never` decide without estimates, and measure all the same.

    may_split: the front of what was found may be loaded alone; a sliding window forbids it, because
      only the blocks before its end were looked for.
    metrics: counts decisions, their estimates, and what they took.
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
        self._mode, self._block_tokens, self._clock = mode, block_tokens, clock
        self._metrics, self._num_parts = metrics, _SPLITS if may_split else 1
        self._probe_every, self._num_computed = probe_every, 0
        self._loads, self._prefill = LoadRate(clock), PrefillRate(clock)
        self._prompts: dict[Hashable, _Prompt] = {}
        self._learning: Hashable = None  # the prompt that is computed to learn what that costs
        self._last_computed: Hashable = None  # the prompt that was counted last

    def decide(
        self, name: Hashable, *, start: int, found: int, num_tokens: int, follows: bool = False
    ) -> Decision:
        """Decides for a prompt of which the engine has `start` tokens and the pool `found`.

        name: of the request; asked again, it is decided anew. A load counts as begun from now on,
          until `load_ended`.
        follows: the load would follow a hand-off. `worked` says then how much of its time it did
          not wait for P; without that it tells no rate.
        """
        self.forget(name)
        backlog = self._backlog()
        load_s = self._total_s(start, max(start, found), num_tokens, backlog)
        compute_s = self._total_s(start, start, num_tokens, backlog)
        wanted = start
        way: Way = "none"
        if found > start:
            wanted = self._choose(name, start, found, num_tokens, backlog)
            way = "compute" if wanted == start else "load" if wanted == found else "both"
        decision = Decision(wanted, way, load_s, compute_s)
        prompt = _Prompt(num_tokens, wanted, decision, self._clock(), wanted - start, follows)
        self._prompts[name] = prompt
        if prompt.num_loading:
            self._loads.started(prompt.num_loading, follows=follows)
        return decision

    def worked(self, name: Hashable, busy_s: float) -> None:
        """Takes up the seconds that a load which follows was at work; call `load_ended` next."""
        prompt = self._prompts.get(name)
        if prompt is not None:
            prompt.busy_s = max(busy_s, prompt.busy_s or 0.0)

    def load_ended(self, name: Hashable, num_present: int) -> None:
        """The load has ended, and so many leading tokens of the prompt are there."""
        prompt = self._prompts.get(name)
        if prompt is not None and prompt.num_loading:
            self._note_load(prompt, max(0, prompt.at - num_present))
            prompt.num_loading, prompt.at = 0, num_present

    def computed(
        self, chunks: Iterable[tuple[Hashable, int, int]], seconds: float
    ) -> list[Outcome]:
        """Takes up a step of the engine: the tokens start..stop of prompts, and its time.

        Returns the outcomes of the prompts whose KV is all there now.
        """
        chunks = list(chunks)
        self._prefill.note_step([(start, stop) for _, start, stop in chunks], seconds)
        ended = []
        for name, _, stop in chunks:
            prompt = self._prompts.get(name)
            if prompt is not None:
                prompt.at = max(prompt.at, stop)
                if prompt.at >= prompt.num_tokens:
                    ended.append(self._end(name))
        return ended

    def forget(self, name: Hashable) -> None:
        """Forgets a prompt: its request has ended, however far it came."""
        if name in self._prompts:
            self._pop(name)

    def _note_load(self, prompt: _Prompt, num_missing: int) -> None:
        num_tokens = prompt.num_loading
        brought = max(0, num_tokens - num_missing)
        if not prompt.follows:
            self._loads.ended(num_tokens, brought)
        elif prompt.busy_s is not None:
            self._loads.followed(num_tokens, brought, prompt.busy_s)
        else:
            self._loads.dropped(num_tokens, follows=True)

    def _pop(self, name: Hashable) -> _Prompt:
        """Forgets a prompt, and the load that was begun or could not even begin."""
        prompt = self._prompts.pop(name)
        if prompt.num_loading:
            self._loads.dropped(prompt.num_loading, follows=prompt.follows)
        return prompt

    def _end(self, name: Hashable) -> Outcome:
        prompt = self._pop(name)
        took_s = self._clock() - prompt.decided_at
        _, way, load_s, compute_s = prompt.decision
        if way != "none" and self._metrics is not None:
            self._metrics.decided(way, load_s, compute_s, took_s)
        return Outcome(name, prompt.decision, took_s)

    def _backlog(self) -> _Backlog:
        ready_s = after_loads_s = 0.0
        for prompt in self._prompts.values():
            seconds = self._prefill.seconds_beside(prompt.at, prompt.num_tokens) or 0.0
            if prompt.num_loading:
                after_loads_s += seconds
            else:
                ready_s += seconds
        return _Backlog(ready_s, after_loads_s)

    def _choose(
        self, name: Hashable, start: int, found: int, num_tokens: int, backlog: _Backlog
    ) -> int:
        if self._mode != "auto":
            return found if self._mode == "always" else start
        if self._loads.seconds(0) is None:
            return found
        to_learn = self._end_to_learn(start, found, num_tokens)
        if to_learn is not None:
            self._learning = name
            return to_learn
        if self._prefill.seconds(start, num_tokens) is None:
            return found
        totals = {
            end: self._total_s(start, end, num_tokens, backlog) or 0.0
            for end in self._ends(start, found)
        }
        best = min(totals, key=lambda end: (totals[end], -end))
        if totals[found] <= _PREFER_LOADING * totals[best]:
            best = found
        return self._probed(name, best, start, found)

    def _end_to_learn(self, start: int, found: int, num_tokens: int) -> int | None:
        """Returns the end of a load that leaves enough to compute to learn its rate, or None."""
        if self._learning in self._prompts or self._prefill.is_known(start, num_tokens):
            return None
        compute_s = self._prefill.seconds(start, num_tokens)
        if compute_s is None:
            return max(end for end in self._ends(start, found) if end < found)
        load_s = self._loads.seconds(found - start) or 0.0
        return start if compute_s < _MOST_WRONG * load_s else None

    def _probed(self, name: Hashable, best: int, start: int, found: int) -> int:
        """Returns what to load instead of nothing, once in a while."""
        if best != start:
            self._num_computed = 0
            return best
        if name != self._last_computed:  # an engine without room asks for the same one again
            self._last_computed = name
            self._num_computed = self._num_computed % self._probe_every + 1
        if self._num_computed < self._probe_every:
            return best
        return next((end for end in self._ends(start, found) if end > start), found)

    def _ends(self, start: int, found: int) -> list[int]:
        """Returns the ends of a load to choose from, in rising order."""
        step = (found - start) / self._num_parts
        ends = {self._whole_blocks(round(start + i * step)) for i in range(1, self._num_parts)}
        return sorted({start, found} | {end for end in ends if start < end < found})

    def _total_s(self, start: int, end: int, num_tokens: int, backlog: _Backlog) -> float | None:
        """Estimated seconds until the KV is there if start..end is loaded and the rest computed.

        Loads share the store, so a load ends with those before it, and what these leave to compute
        comes first. A prompt that is computed holds up those whose load ends meanwhile: that counts
        as its own time.
        """
        compute_s = self._prefill.seconds(min(end, num_tokens - 1), num_tokens)
        if compute_s is None:
            return None
        if end <= start:
            total_s = backlog.ready_s + compute_s
            if 0.0 < (self._loads.seconds(0) or 0.0) < total_s:
                total_s += backlog.after_loads_s + self._prefill.step_s
            return total_s
        load_s = self._loads.seconds(end - start)
        if load_s is None:
            return None
        return max(load_s, backlog.ready_s) + backlog.after_loads_s + compute_s

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._block_tokens
