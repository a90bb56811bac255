"""The table of the metrics: names as Prometheus wants them."""

from __future__ import annotations

import re

from pdstore.telemetry.metric_table import METRICS, Kind


def test_names_are_as_prometheus_wants_them():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not name.endswith("_total")
        assert (metric.kind is Kind.HISTOGRAM) == name.endswith("_seconds")
