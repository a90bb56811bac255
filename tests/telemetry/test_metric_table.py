"""The table of the metrics: names as Prometheus wants them, and a row of the documents for each."""

from __future__ import annotations

import re

from pdstore.telemetry.metric_table import METRICS, Kind
from tests.docs.tables import metrics_table


def test_names_are_as_prometheus_wants_them():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not name.endswith("_total")
        assert (metric.kind is Kind.HISTOGRAM) == name.endswith("_seconds")


def test_the_documents_table_has_a_row_for_every_metric():
    rows = metrics_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [m.shown_name for m in METRICS.values()]
