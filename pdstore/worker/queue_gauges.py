"""QueueGauges: the numbers of a job queue as metrics, for as long as the queue is open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdstore.metrics import Metrics, Showing
from pdstore.outcome import Direction
from pdstore.worker.waiting_jobs import WaitingJobs


class QueueGauges:
    """Shows what a queue holds; `clear` ends that, because metrics outlive a pool.

    waiting: the jobs that no worker has begun.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        num_alive: Callable[[], int],
        num_hung: Callable[[], int],
        waiting: WaitingJobs,
    ) -> None:
        shown: list[tuple[Showing, Callable[[], int]]] = [
            (metrics.jobs_alive, num_alive),
            (metrics.hung_store_calls, num_hung),
        ]
        for way in Direction:
            jobs, queued = (m.labels(way.value) for m in (metrics.queue_jobs, metrics.queue_bytes))
            shown.append((jobs, partial(waiting.num_jobs, way)))
            shown.append((queued, partial(waiting.num_bytes, way)))
        self._gauges = [gauge for gauge, _ in shown]
        for gauge, number in shown:
            gauge.set_function(number)

    def clear(self) -> None:
        """Shows zeros from now on."""
        for gauge in self._gauges:
            gauge.set_function(lambda: 0)
