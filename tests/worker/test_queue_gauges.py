"""QueueGauges: what waits is shown by direction, and nothing after the end."""

from __future__ import annotations

from pdstore.metrics import Metrics
from pdstore.worker.queue_gauges import QueueGauges
from pdstore.worker.waiting_jobs import WaitingJobs
from tests.support.jobs import LOAD, SAVE, run_of


def test_what_waits_is_shown_by_direction_until_the_end():
    metrics = Metrics()
    waiting = WaitingJobs()
    for num_bytes in (5, 7):
        waiting.add(run_of(direction=LOAD, num_bytes=num_bytes))
    gauges = QueueGauges(metrics, num_alive=lambda: 3, num_hung=lambda: 1, waiting=waiting)

    def shown():
        return [
            metrics.registry.get_sample_value("pdstore_jobs_alive"),
            metrics.registry.get_sample_value("pdstore_hung_store_calls"),
            metrics.registry.get_sample_value("pdstore_queue_jobs", {"direction": "load"}),
            metrics.registry.get_sample_value("pdstore_queue_bytes", {"direction": "load"}),
            metrics.registry.get_sample_value("pdstore_queue_jobs", {"direction": "save"}),
        ]

    assert shown() == [3, 1, 2, 12, 0]
    waiting.add(run_of(direction=SAVE, num_bytes=1))
    assert shown()[-1] == 1
    gauges.clear()
    assert shown() == [0, 0, 0, 0, 0]
