"""Dashboard and alerts: promtool tests the rules; a real Prometheus answers every query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram

from pdstore.metrics import METRICS, Kind
from pdstore.router.counts import Counts
from tests.support.mini_engine_kit import decode, hand_over, pd_of, prompt_of, until
from tests.support.monitoring import monitoring

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "pdstore.rules.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "pdstore.json").read_text())
QUERIES = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="needs Debian's package prometheus",
)
needs_alertmanager = pytest.mark.skipif(
    not shutil.which("prometheus-alertmanager"),
    reason="needs Debian's package prometheus-alertmanager",
)


def shown_names() -> set[str]:
    kinds = {Kind.HISTOGRAM: ("", "_bucket", "_sum", "_count")}
    return {m.shown_name + end for m in METRICS.values() for end in kinds.get(m.kind, ("",))}


TEXTS = {"rules": RULES.read_text(), "dashboard": "\n".join(QUERIES)}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_only_metrics_of_the_table_are_named(text):
    assert set(re.findall(r"\bpdstore_\w+", text)) <= shown_names()


def test_every_metric_of_the_router_is_on_the_dashboard():
    families = {family.name for family in Counts().registry.collect()}
    shown = set(re.findall(r"\brouter_\w+", "\n".join(QUERIES)))
    assert {re.sub("_(total|bucket)$", "", name) for name in shown} == families


def test_the_dashboard_begins_with_what_the_pool_brings_and_costs():
    first = sorted(DASHBOARD["panels"], key=lambda p: (p["gridPos"]["y"], p["gridPos"]["x"]))[:4]
    assert [panel["title"] for panel in first] == [
        "Hit rate",
        "Seconds of prefill saved, each second",
        "Exposed wait",
        "First token",
    ]


def test_no_panel_of_the_dashboard_lies_on_another():
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_alert_links_its_section_of_the_runbook():
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}
    for name, rule in alerts.items():
        link = rule["annotations"]["runbook_url"]
        assert link == "{{ $externalLabels.runbook_base }}#" + name.lower()
    runbook = (DEPLOY.parent / "docs" / "runbook.md").read_text()
    assert set(re.findall(r"^### (Pdstore\w+)$", runbook, re.MULTILINE)) == set(alerts)
    config = yaml.safe_load(RULES.with_name("prometheus.yaml").read_text())
    assert config["global"]["external_labels"]["runbook_base"].endswith("/runbook.html")


def test_every_metric_but_the_codes_of_one_store_is_on_the_dashboard():
    text = "\n".join(QUERIES)
    missing = {m.name for m in METRICS.values() if m.shown_name not in text}
    assert missing == {"store_codes"}


@needs_prometheus
def test_every_alert_fires_for_its_cause():
    for verb, file in (("check", RULES), ("test", RULES.with_name("pdstore.test.yaml"))):
        command = ["promtool", verb, "rules", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@needs_alertmanager
@pytest.mark.redis
@pytest.mark.slow
def test_a_dead_store_is_an_alert_and_every_panel_has_data(open_engine, redis_server, tmp_path):
    redis = redis_server()
    url = f"redis://127.0.0.1:{redis.port}/0?timeout=0.5 file://{tmp_path}/below?budget=1GiB"
    p, d = (open_engine("llama", pd_of(role, url)) for role in ("prefill", "decode"))

    def handed_over(seed):
        prompt = prompt_of(100, seed)
        decode(d, prompt, hand_over(p, prompt))

    router = Counts()
    vllms = CollectorRegistry()
    first_token = Histogram("vllm:time_to_first_token_seconds", "as vLLM has it", registry=vllms)
    registries = {"p": p.counters.registry, "d": d.counters.registry, "router": router.registry}
    registries["vllm"] = vllms
    with monitoring(tmp_path, RULES, registries) as seen:
        handed_over(0)
        until(lambda: seen.query("pdstore_info"))
        waiting = set(QUERIES)
        seeds = iter(range(1, 1000))

        def have_data():
            handed_over(next(seeds))
            router.requests.labels("200").inc()
            router.failures.labels("prefill", "status").inc()
            router.first_byte.observe(0.1)
            first_token.observe(0.1)
            waiting.difference_update([q for q in waiting if seen.query(q)])
            return not waiting

        until(have_data)
        assert len(seen.query("pdstore_info == 1")) == 2
        redis.stop()
        until(lambda: handed_over(next(seeds)) or "PdstoreStoreDown" in seen.alerts())
