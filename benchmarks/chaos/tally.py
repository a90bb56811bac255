"""Tally: what a campaign has done and found, as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.chaos.audit import Audit
from benchmarks.chaos.round import Outcome


class Tally:
    """Sums over all rounds.

    failures: what must not be, in words; a campaign without any is good.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.faults: Counter[str] = Counter()
        self._in_process: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._stages: Counter[str] = Counter()
        self._num_rounds = 0
        self._slowest_s = 0.0
        self._peak_bytes: dict[str, int] = {}

    @property
    def num_faults(self) -> int:
        hung_calls = self._in_process["faulty_hold"]  # of faults that the injector counts
        return self.faults.total() + self._in_process.total() - hung_calls

    def add_round(self, outcome: Outcome, faults: Counter[str], leaks: list[str]) -> None:
        self._num_rounds += 1
        self.faults += faults
        self._slowest_s = max(self._slowest_s, outcome.slowest_s)
        self._requests += Counter(
            {
                **{"right": outcome.right, "right and loaded": outcome.loaded},
                **{"refused while a fault was on their way": outcome.refused},
                **{"left by their client": outcome.left, "leaks": len(leaks)},
                **{
                    kind: sum(failure.startswith(kind) for failure in outcome.failures)
                    for kind in ("wrong", "hang", "lost", "died")
                },
            }
        )

    def add_stage(self, kind: str, audit: Audit) -> None:
        self._stages[kind] += 1
        self._in_process += Counter(audit.in_process)
        for name, peak in audit.peak_bytes.items():
            self._peak_bytes[name] = max(self._peak_bytes.get(name, 0), peak)

    def result(self) -> dict[str, Any]:
        """Returns the numbers for a file."""
        kinds = ("wrong", "hang", "lost", "died", "leaks")
        return {
            "num_faults": self.num_faults,
            **{kind: self._requests[kind] for kind in kinds},
            "failures": self.failures,
            "num_rounds": self._num_rounds,
            "stages": dict(self._stages),
            "requests": {k: v for k, v in sorted(self._requests.items()) if k not in kinds},
            "slowest_answer_s": round(self._slowest_s, 2),
            "peak_mib": {name: peak >> 20 for name, peak in self._peak_bytes.items()},
            "faults": dict(sorted(self.faults.items())),
            "faults_in_process": dict(sorted(self._in_process.items())),
        }
