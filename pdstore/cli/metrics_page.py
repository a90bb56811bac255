"""MetricsPage: pdstore's numbers on an instance's /metrics, summed over its processes."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from pdstore.cli.http_get import http_get
from pdstore.errors import StoreUnavailable

_TIMEOUT_S = 3.0


class MetricsPage:
    """One look at an instance. read_s: when, by a clock that only goes on."""

    def __init__(self, text: str, read_s: float) -> None:
        self.read_s = read_s
        self._samples: list[tuple[str, Mapping[str, str], float]] = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "pdstore_" in sample.name
        ]

    @classmethod
    def read(cls, url: str) -> MetricsPage:
        """Asks an instance. Raises StoreUnavailable."""
        address = url.rstrip("/")
        address = address if address.endswith("/metrics") else address + "/metrics"
        try:
            text = http_get(address, _TIMEOUT_S).decode("utf-8", "replace")
            return cls(text, time.monotonic())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"{address}: {error}") from error

    def has(self, name: str) -> bool:
        """True if it shows this metric, be it 0."""
        return any(found.rpartition(":")[2] == name for found, _, _ in self._samples)

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that have these labels; 0 if there are none.

        name: with or without vLLM's prefix in front, which is cut.
        """
        return sum(
            value
            for found, has, value in self._samples
            if found.rpartition(":")[2] == name and labels.items() <= has.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Returns the sums of a metric's samples by one label, those of 0 left out."""
        sums: dict[str, float] = {}
        for found, has, value in self._samples:
            if found.rpartition(":")[2] == name and value:
                key = has.get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums
