"""NearWorker: the one worker, where it is in the scheduler's process."""

from __future__ import annotations

from typing import Any

from pdstore.adapters.vllm.describe import shows_outputs_first
from pdstore.adapters.vllm.messages import PDStoreConnectorMetadata, RankLayout, StepReport
from pdstore.adapters.vllm.worker import PDStoreConnectorWorker


class NearWorker:
    """Asks the worker which loads have ended, whenever vLLM takes up the output of a step.

    With asynchronous scheduling vLLM takes up a step's output after it has launched the next step,
    so it hears a step late of what the worker said. But it shows the scheduler side each output
    first (`update_connector_output`), which adds the loads that have ended since. vLLM's thread
    calls it.

    is_owed_a_step: jobs have ended whose counts vLLM gets with the output of the next step.
    """

    def __init__(self, worker: PDStoreConnectorWorker) -> None:
        self._worker, self._wait_s = worker, 0.0
        self.is_owed_a_step = False
        worker.loads.is_near = True

    @classmethod
    def of(cls, rank: RankLayout, vllm_config: Any) -> NearWorker | None:
        """Takes the only rank, and VllmConfig.

        Returns None where its worker is in another process or another connector's too, and for a
        vLLM that takes outputs up in another way.
        """
        worker = rank.worker
        if worker is None or worker.loads.is_near or not shows_outputs_first(vllm_config):
            return None
        return cls(worker)

    def take_wait(self, metadata: PDStoreConnectorMetadata) -> None:
        """Takes over the wait of a step that begins: `take_ended` waits in the worker's place."""
        self._wait_s, metadata.wait_s = metadata.wait_s, 0.0
        self.is_owed_a_step = False

    def take_ended(self, output: Any) -> tuple[StepReport | None, set[str]]:
        """Adds to vLLM's KVConnectorOutput the requests whose loads have ended.

        Returns them, and what else has ended.
        """
        loaded = self._worker.take_complete(self._wait_s)
        if loaded:
            output.finished_recving = loaded | (output.finished_recving or set())
        report = self._worker.take_report()
        self.is_owed_a_step |= report is not None and bool(report.ended)
        return report, loaded
