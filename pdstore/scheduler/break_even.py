"""PromptTimes: decides which part of a prompt is loaded and which is computed."""

# Decision: docs/decisions/015-load-or-compute.md
from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from pdstore.format.keys import Namespace
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.tier_spans import TierSpan, tokens_by_tier

Mode: TypeAlias = Literal["auto", "never"]
Way: TypeAlias = Literal["load", "compute", "both", "none"]
RequestName: TypeAlias = Hashable

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


class LoadCosts:
    """The seconds that a loaded token takes, by the tier of the store that it is read from.

    A store without tiers has the tier 0 alone.
    """

    def __init__(self) -> None:
        self._of_tier: dict[int, CostAverage] = defaultdict(CostAverage)

    def forget(self, tier: int) -> None:
        """Forgets what is known of a tier, as the next measurement tells more than all before."""
        self._of_tier.pop(tier, None)

    def unknown(self, num_tokens: Mapping[int, int]) -> set[int]:
        """Returns those of the tiers that nothing is known of. num_tokens: by tier."""
        return {tier for tier in num_tokens if self._of_tier[tier].per_token_s is None}

    def seconds(self, num_tokens: Mapping[int, int]) -> float:
        """Returns the time to load tokens of several tiers; those of unknown tiers count nothing.

        num_tokens: by tier.
        """
        return sum(
            count * (self._of_tier[tier].per_token_s or 0.0) for tier, count in num_tokens.items()
        )

    def add_sample(self, num_tokens: Mapping[int, int], seconds: float) -> None:
        """Adds the time of a load, which may have read several tiers, to their averages.

        The tiers above keep the cost that they have, and the rest of the time is that of the lowest
        tier: disks vary more than memory, and loads of memory alone measure it. If some tiers are
        unknown, the lowest of these takes the rest, if most of the tokens of unknown cost are its
        own. If the load was so quick that little is left, each tier gets its part of the time.
        """
        num_tokens = {tier: count for tier, count in num_tokens.items() if count > 0}
        unknown = self.unknown(num_tokens)
        measured = unknown or {tier for tier, count in num_tokens.items() if count >= _MIN_TOKENS}
        lowest = max(measured, default=0)
        num_unknown = sum(num_tokens[tier] for tier in unknown)
        if not measured or 2 * num_tokens[lowest] < num_unknown:
            return
        own = {lowest: num_tokens[lowest]}
        rest_s = seconds - self.seconds(num_tokens) + self.seconds(own)
        if unknown or len(num_tokens) == 1 or rest_s > self.seconds(own) / 2:
            self._of_tier[lowest].add_sample(num_tokens[lowest], rest_s)
            return
        quicker = seconds / self.seconds(num_tokens)
        for tier, count in num_tokens.items():
            self._of_tier[tier].add_sample(count, self.seconds({tier: count}) * quicker)


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
    loading: how many of its tokens are being loaded, by the tier where they were found.
    probed: tiers of which it measures the cost anew, whatever was measured before.
    """

    num_tokens: int
    at: int
    way: Way
    decided_at: float
    loading: Mapping[int, int]
    probed: set[int] = field(default_factory=set)

    @property
    def num_loading(self) -> int:
        """Tokens that are being loaded."""
        return sum(self.loading.values())


class _Part(NamedTuple):
    """The first part of what was found, up to the token `end`, as one that may be loaded.

    own: its tokens that the engine lacks, by tier.
    queued: these, and those of the same tiers that are being loaded for other prompts.
    """

    end: int
    own: Mapping[int, int]
    queued: Mapping[int, int]


class PromptTimes:
    """Decides which part of each prompt is loaded, by the measured times to load and to compute.

    - `auto` compares the times to load and to compute what was found, each behind all tokens that
      wait for the same, and favours the cheaper way. Until both times are measured, the first
      prompt is loaded, and later ones are loaded or computed to measure both.
    - While `auto` computes all prompts, one request in `probe_every` still loads the first part of
      what was found, to notice if the store has become fast.
    - If the store has several tiers, each has a cost of its own, and a load takes the sum of the
      times for its tiers. If a part of a prompt lies in a slow tier, only what lies before this
      part may be loaded.
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
        # consecutive prompts for which computing was quicker, of what is in a tier and behind it
        self._num_computed: Counter[int] = Counter()
        self._load_costs = LoadCosts()
        self._compute_cost = CostAverage()
        self._prompts: dict[RequestName, _Prompt] = {}
        self._is_cold = True
        self._last_load_end = 0.0
        self._most_loading = 0  # maximum number of tokens in loading since the last measurement
        self._num_brought: Counter[int] = Counter()  # loaded since the last measurement, by tier
        self._busy_s = 0.0  # seconds in which any load ran since the last measurement
        self._running: set[RequestName] = set()  # requests whose prompts are being computed
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

    def decide(
        self,
        name: RequestName,
        *,
        start: int,
        found: int,
        num_tokens: int,
        spans: Sequence[TierSpan] = (),
    ) -> Decision:
        """Decides how much of a prompt is loaded.

        name: the request's name; a second call for a request replaces the first decision. The load
          counts as running from this call until `load_ended`.
        start: how many leading tokens of the prompt the engine has.
        found: how many leading tokens the pool has.
        spans: in which tiers it has them (`Match.spans`); nothing if the store has no tiers.
        """
        self._prompts.pop(name, None)
        loading = self._loading()
        num_loading = sum(loading.values())
        end, probed = start, set[int]()
        if self._mode == "auto" and found > start:
            end, probed = self._end_of_load(start, found, spans, loading)
        way: Way = "compute" if end <= start else "load" if end == found else "both"
        way = "none" if found <= start else way
        own = tokens_by_tier(spans, start, end)
        self._prompts[name] = _Prompt(num_tokens, end, way, self._clock(), own, probed)
        self._most_loading = max(self._most_loading, num_loading + end - start)
        return Decision(end, way)

    def load_ended(
        self,
        name: RequestName,
        num_present: int,
        seconds: float,
        by_tier: Mapping[int, int] | None = None,
    ) -> None:
        """Records that a load has ended; the engine now has `num_present` leading tokens.

        seconds: how long the load took; not how long it took until the engine saw its end.
        by_tier: how many of the loaded tokens were read from each tier; None if that is not known,
          or if the store has no tiers.

        Loads share the store's rate, so those that run at the same time make one measurement. The
        first measurement is not used: it opens connections, and touches memory for the first time.
        """
        prompt = self._prompts.get(name)
        if prompt is None or not prompt.num_loading:
            return
        ended_at = prompt.decided_at + seconds
        self._busy_s += max(0.0, min(seconds, ended_at - self._last_load_end))
        self._last_load_end = max(self._last_load_end, ended_at)
        num_kept = prompt.num_loading - max(0, prompt.at - num_present)
        is_whole = num_kept == prompt.num_loading
        expected = prompt.loading if is_whole else {max(prompt.loading): num_kept}
        self._num_brought.update(by_tier or expected)
        prompt.loading = {}
        prompt.at = num_present
        num_left = sum(self._loading().values())
        if num_left and self._num_brought.total() < self._most_loading:
            return
        for tier in prompt.probed:  # a probe's measurement replaces all earlier ones
            self._load_costs.forget(tier)
        if not self._is_cold:
            self._load_costs.add_sample(self._num_brought, self._busy_s)
        self._is_cold = False
        self._most_loading = num_left
        self._num_brought = Counter()
        self._busy_s = 0.0

    def begin_step(self, name: RequestName, start: int, stop: int) -> None:
        """Records that a step begins to compute tokens `start` to `stop` - 1 of a prompt."""
        if not self._running:
            self._since = self._clock()
            self._num_begun = 0
        self._running.add(name)
        self._num_begun += stop - start
        if (prompt := self._prompts.get(name)) is not None:
            prompt.at = stop

    def end_prompt(self, name: RequestName) -> None:
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

    def forget(self, name: RequestName) -> None:
        """Forgets the prompt of a request that has ended, even if it was not computed."""
        self._prompts.pop(name, None)
        self._running.discard(name)

    def _loading(self) -> Mapping[int, int]:
        """Returns how many tokens of all prompts are being loaded, by tier."""
        loading: dict[int, int] = {}
        for prompt in self._prompts.values():  # may be many, and `Counter.update` is slow
            if prompt.loading:
                for tier, count in prompt.loading.items():
                    loading[tier] = loading.get(tier, 0) + count
        return loading

    def _end_of_load(
        self, start: int, found: int, spans: Sequence[TierSpan], loading: Mapping[int, int]
    ) -> tuple[int, set[int]]:
        """Returns where the load ends: at `start` (no load), at `found`, or between.

        Also returns the tiers that the load probes: of which it measures the cost anew.
        loading: as `_loading` returns it.
        """
        parts = self._parts(start, found, spans, loading)
        backlog = sum(prompt.num_tokens - prompt.at for prompt in self._prompts.values())
        part = self._best(parts, found)
        if self._is_worth_it(part, backlog):
            for tier in [] if self._is_unmeasured(part) else part.own:
                del self._num_computed[tier]
            return self._probed(part.end, found, spans) if part.end < found else (found, set())
        if self._is_unmeasured(part):
            return start, set()
        return self._probed(start, found, spans)

    def _parts(
        self, start: int, found: int, spans: Sequence[TierSpan], loading: Mapping[int, int]
    ) -> list[_Part]:
        """Returns the parts of a prompt that may be loaded, the whole of what was found first."""
        ends = {span.stop for span in spans if start < span.stop < found and self._may_split}
        parts = []
        for end in (found, *sorted(ends, reverse=True)):
            own = tokens_by_tier(spans, start, end)
            queued = {tier: count + loading.get(tier, 0) for tier, count in own.items()}
            parts.append(_Part(end, own, queued))
        return parts

    def _best(self, parts: Sequence[_Part], found: int) -> _Part:
        """Returns the part with which all that was found is there soonest, the rest computed.

        The largest with a tier that is not measured yet, and that no load measures now, comes first
        of all. Without any measurement that is the whole.
        """
        compute_s = self._compute_cost.per_token_s
        known = []
        for part in parts:
            unknown = self._load_costs.unknown(part.own)
            if not unknown:
                known.append(part)
            elif compute_s is None or all(part.own[t] == part.queued[t] for t in unknown):
                return part
        if compute_s is None or not known:
            return known[0] if known else parts[0]
        rate_s = compute_s
        return min(
            known,
            key=lambda part: self._load_costs.seconds(part.queued) + rate_s * (found - part.end),
        )

    def _is_unmeasured(self, part: _Part) -> bool:
        unknown = self._load_costs.unknown(part.own)
        return bool(unknown) or self._compute_cost.per_token_s is None

    def _is_worth_it(self, part: _Part, backlog: int) -> bool:
        """Returns whether to load a part, after loads that wait, rather than to compute it.

        backlog: tokens that would be computed before it.
        """
        compute_s = self._compute_cost.per_token_s
        num_queued, num_own = sum(part.queued.values()), sum(part.own.values())
        if self._load_costs.unknown(part.own):
            is_first = num_queued == num_own
            return num_queued - num_own <= backlog if compute_s is None else is_first
        if compute_s is None:
            return backlog >= _MIN_TOKENS
        load_s = self._load_costs.seconds(part.queued)
        ratio = load_s / num_queued / compute_s
        return load_s * min(ratio, ratio**2) + self._step_s <= compute_s * (backlog + num_own)

    def _probed(self, start: int, found: int, spans: Sequence[TierSpan]) -> tuple[int, set[int]]:
        """Returns `start`, as what lies behind it is computed; for some prompts a little more."""
        [tier, *_] = tokens_by_tier(spans, start, start + 1)
        self._num_computed[tier] += 1
        if self._num_computed[tier] % self._probe_every:
            return start, set()
        end = start + max(_MIN_TOKENS, (found - start) // _PROBE_PART)
        end -= end % self._block_tokens
        if not (self._may_split and start < end < found):
            return found, set()
        return end, set(tokens_by_tier(spans, start, end))
