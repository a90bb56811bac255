"""RunningLoads: the loads of one rank, from their start until vLLM is told of their end."""

from __future__ import annotations

from collections.abc import Collection

from pdstore.adapters.vllm.messages import LoadSpec
from pdstore.format.layout import NO_BLOCK
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.worker.job import Job


class RunningLoads:
    """Holds each load until `take` has told its end. vLLM's thread calls it.

    block_tokens: tokens of one block in vLLM's block tables; None while that is not known.
    fails_whole: a load that brings less than was promised counts as having brought nothing.
    """

    def __init__(
        self, metrics: Metrics, block_tokens: int | None = None, *, fails_whole: bool = False
    ) -> None:
        self._metrics, self._block_tokens = metrics, block_tokens
        self._fails_whole = fails_whole
        self._loads: dict[str, tuple[LoadSpec, Job | None]] = {}
        self._failed: set[str] = set()
        self._loaded: dict[str, tuple[int, float]] = {}
        self._bad_blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def failed(self) -> set[str]:
        """Requests whose load, just taken, brought less than was promised."""
        return set(self._failed)

    def put(self, spec: LoadSpec, job: Job | None) -> None:
        """Adds a load; again with its job, once that has started."""
        self._loads[spec.request_id] = (spec, job)

    def take(self, finished: Collection[str] = ()) -> set[str]:
        """Returns the requests whose load has ended since the last call, well or not.

        finished: requests that have ended; their loads are cancelled.
        """
        ended = set()
        for request_id, (_, job) in self._loads.items():
            if job is not None and request_id in finished:
                job.cancel()
            if job is not None and not job.done:
                continue
            ended.add(request_id)
        for request_id in ended:
            self._end(request_id)
        return ended

    def take_bad_blocks(self) -> set[int]:
        """Returns the ids of vLLM's blocks that the loads just taken did not fill."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_outcomes(self) -> tuple[set[str], dict[str, tuple[int, float]]]:
        """Returns what `StepReport.failed` and `.loaded` tell of the loads taken."""
        outcomes = self._failed, self._loaded
        self._failed, self._loaded = set(), {}
        return outcomes

    def _end(self, request_id: str) -> None:
        """Forgets a load that has ended, and notes what it brought."""
        spec, job = self._loads.pop(request_id)
        result = job.result if job is not None else None
        num_loaded = max(spec.first_token, result.num_tokens) if result else spec.first_token
        if result is not None:
            self._loaded[request_id] = (num_loaded - spec.first_token, result.busy_s)
        if _is_complete(spec, job):
            return
        self._failed.add(request_id)
        if result is None and spec.keys is not None:  # without keys it is to fail, and why is known
            self._metrics.miss(Reason.FAULT)
        if not self._fails_whole and self._block_tokens is not None:
            first = num_loaded // self._block_tokens
            self._bad_blocks |= {id for id in spec.tables[0][first:] if id != NO_BLOCK}


def _is_complete(spec: LoadSpec, job: Job | None) -> bool:
    """True if a load has ended and has brought what vLLM counts on."""
    if spec.keys is None or job is None or (result := job.result) is None:
        return False
    return max(spec.first_token, result.num_tokens) >= spec.num_tokens
