"""The queries of docs/hit_rate.md, computed by promtool from counters that grow evenly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "hit_rate.md").read_text()
QUERIES = re.findall(r"^```promql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

GROWTH = {
    # each minute
    'pdstore_tokens_total{verb="requested"': 1000,
    'pdstore_tokens_total{verb="matched"': 400,
    'pdstore_tokens_total{verb="promised"': 300,
    'pdstore_tokens_total{verb="lost"': 30,
    'pdstore_tokens_total{verb="loaded"': 60,
    'vllm_request_prefill_time_seconds_sum{model_name="m"': 30,
    'vllm_prompt_tokens_by_source_total{source="local_compute",model_name="m"': 600,
    'vllm_prompt_tokens_by_source_total{source="external_kv_transfer",model_name="m"': 60,
    'pdstore_job_seconds_sum{direction="load"': 1,
    'pdstore_job_seconds_sum{direction="save"': 7,
    'pdstore_exposed_seconds_bucket{le="1"': 99,
    'pdstore_exposed_seconds_bucket{le="+Inf"': 100,
}
VALUES = [0.4, 0.1, 60 * 60 * (30 / 600) - 60 * 1, 1.0]
"""The hit rate, the lost share, the seconds saved in an hour, and the p99 of the wait."""


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's package prometheus")
@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
def test_the_queries_of_the_page_give_what_it_says(prefix, tmp_path):
    """To a Prometheus before 3.0 newer client libraries write `vllm_` for `vllm:`."""
    assert len(QUERIES) == len(VALUES)
    series = [
        {"series": f'{name.replace("vllm_", prefix)},instance="p"}}', "values": f"0+{each}x120"}
        for name, each in GROWTH.items()
    ]
    checks = [
        {
            "expr": f"round({query}, 0.001)",
            "eval_time": "90m",
            "exp_samples": [{"labels": '{instance="p"}', "value": value}],
        }
        for query, value in zip(QUERIES, VALUES, strict=True)
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
