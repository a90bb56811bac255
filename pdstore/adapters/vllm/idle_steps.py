"""IdleSteps: how long workers may wait in a step that computes nothing."""

from __future__ import annotations

from typing import Any

_WAIT_S = 0.002


class IdleSteps:
    """Finds the steps in which vLLM has nothing to do but to ask which loads and saves have ended.

    vLLM makes such steps a millisecond apart. Their Python holds up the very jobs that they ask
    about, and an end is heard of one step late. So workers wait for it within the step. The wait is
    short, because a request that comes meanwhile waits as well.

    most_begun: steps that vLLM may begin before it takes up the result of the first. Nobody waits
      while one of them may still have a result. None: nobody ever waits, because other instances
      step together with this one.
    """

    def __init__(self, most_begun: int | None = 2) -> None:
        self._most_begun = most_begun
        self._num_idle = 0  # in a row, with the next one

    @classmethod
    def of(cls, parallel: Any) -> IdleSteps:
        """Takes vLLM's ParallelConfig."""
        if parallel.data_parallel_size > 1:
            return cls(None)
        return cls(parallel.pipeline_parallel_size + 1)  # the most, with asynchronous scheduling

    def wait_s(self, num_tokens: int, *, is_asking: bool) -> float:
        """Returns the seconds for which workers may wait in the next step.

        num_tokens: those that it computes.
        is_asking: lookups are under way; only a step takes their answers up.
        """
        self._num_idle = 0 if num_tokens else self._num_idle + 1
        if is_asking or self._most_begun is None or self._num_idle < self._most_begun:
            return 0.0
        return _WAIT_S
