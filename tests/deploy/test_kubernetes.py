"""deploy/kustomize: the components fit the base, the rules of Prometheus and each other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.kubernetes_rules import OBJECT, RULES, object_of
from tests.deploy.commands import DEPLOY

KUSTOMIZE = DEPLOY / "kustomize"
COMPONENTS = KUSTOMIZE / "components"
SHOWN = ("vllm:num_requests_waiting", "vllm_num_requests_waiting")
"""The series' names in Prometheus, which asks for the one or the other by its version."""
needs_kubectl = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="needs kubectl, which Debian's packages have too old"
)


def objects_in(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def test_the_rules_of_the_operator_are_those_of_prometheus():
    assert OBJECT.read_text() == object_of(RULES.read_text()), (
        "python scripts/kubernetes_rules.py writes the rules anew"
    )
    [rule] = objects_in(OBJECT)
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


def test_no_variable_of_a_pod_is_empty():
    """An empty variable makes each start say that it is as if not set."""
    lines = [line for path in KUSTOMIZE.rglob("*.env") for line in path.read_text().splitlines()]
    assert {line.partition("=")[0] for line in lines} >= {"PDSTORE_STORE", "HF_TOKEN"}
    assert all(line.partition("=")[2] for line in lines)


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_vllms_metric():
    wanted = {
        metric["pods"]["metric"]["name"]
        for scaler in objects_in(COMPONENTS / "autoscaling" / "scaling.yaml")
        for metric in scaler["spec"]["metrics"]
    }
    [rule] = adapter_rules()
    assert wanted == {name_of(rule, series) for series in SHOWN}


def adapter_rules() -> list[dict]:
    [config] = objects_in(COMPONENTS / "autoscaling" / "adapter.yaml")
    assert config.keys() == {"rules"}
    return config["rules"]


def name_of(rule: dict, series: str) -> str:
    """The metric's name in Kubernetes, as prometheus-adapter makes it of the series' name."""
    [pattern] = re.findall(r'__name__=~"(.*?)"', rule["seriesQuery"])
    assert re.fullmatch(pattern, series)
    name = rule["name"]
    assert re.search(name["matches"], series)
    return re.sub(name["matches"], name["as"].replace("${1}", r"\1"), series)


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's package prometheus")
def test_the_adapters_query_tells_the_waiting_requests_of_each_pod(tmp_path, shown):
    """The query as the adapter fills it in for an autoscaler's pods; promtool evaluates it."""
    [rule] = adapter_rules()
    assert rule["resources"]["overrides"] == {
        "namespace": {"resource": "namespace"},
        "pod": {"resource": "pod"},
    }
    query = rule["metricsQuery"]
    filled = {
        "<<.Series>>": shown,
        "<<.LabelMatchers>>": 'namespace="pdstore",pod=~"p1|p2"',
        "<<.GroupBy>>": "pod",
    }
    for part, text in filled.items():
        assert part in query
        query = query.replace(part, text)

    def series(pod, model, values, namespace="pdstore"):
        labels = f'namespace="{namespace}",pod="{pod}",model_name="{model}"'
        return {"series": f"{shown}{{{labels}}}", "values": values}

    test = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    series("p1", "a", "1 3"),
                    series("p1", "b", "1 2"),
                    series("p2", "a", "0 7"),
                    series("p1", "a", "9 9", namespace="another"),
                ],
                "promql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": "15s",
                        "exp_samples": [
                            {"labels": '{pod="p1"}', "value": 5},
                            {"labels": '{pod="p2"}', "value": 7},
                        ],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "adapter.test.yaml"
    file.write_text(json.dumps(test))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_component_is_told_of_in_the_readme():
    names = {path.name for path in COMPONENTS.iterdir()}
    readme = (DEPLOY / "README.md").read_text()
    assert len(names) == 5
    assert names <= set(re.findall(r"`([\w-]+)`", readme))


@pytest.fixture
def rendered(tmp_path):
    """The objects of an overlay of a user's own, with all components."""
    overlay = KUSTOMIZE / "overlays" / "redis"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "mine",
        "resources": [relative(overlay, tmp_path)],
        "components": [relative(path, tmp_path) for path in COMPONENTS.iterdir()],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    command = ["kubectl", "kustomize", str(tmp_path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


def relative(path: Path, start: Path) -> str:
    return os.path.relpath(path.resolve(), start.resolve())


@needs_kubectl
def test_all_components_together_fit_into_another_namespace(rendered):
    by_kind: dict[str, set[str]] = {}
    for each in rendered:
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == "mine"
        by_kind.setdefault(each["kind"], set()).add(each["metadata"]["name"])
    assert by_kind["PodDisruptionBudget"] == {"router", "prefill", "decode"}
    assert by_kind["HorizontalPodAutoscaler"] == {"prefill", "decode"}
    assert by_kind["PodMonitor"] == by_kind["PrometheusRule"] == {"pdstore"}
    assert "pdstore-adapter" in by_kind["ConfigMap"]


@needs_kubectl
def test_p_and_d_get_the_token_and_the_monitor_finds_every_pod(rendered):
    [secret] = [o for o in rendered if o["kind"] == "Secret" and "HF_TOKEN" in o["data"]]
    [monitor] = [o for o in rendered if o["kind"] == "PodMonitor"]
    [selected] = monitor["spec"]["selector"]["matchExpressions"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    pods = {o["metadata"]["name"]: o["spec"]["template"] for o in rendered if is_deployment(o)}
    for name in selected["values"]:
        [container] = pods[name]["spec"]["containers"]
        assert pods[name]["metadata"]["labels"][selected["key"]] == name
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
        secrets = [one.get("secretRef", {}).get("name") for one in container.get("envFrom", [])]
        assert (secret["metadata"]["name"] in secrets) == (name in ("prefill", "decode"))


@needs_kubectl
def test_to_apply_it_again_takes_back_no_scaling(rendered):
    """`kubectl apply` would set a number of pods that is written, whatever the autoscaler's is."""
    scaled = {o["metadata"]["name"] for o in rendered if o["kind"] == "HorizontalPodAutoscaler"}
    counts = {
        o["metadata"]["name"]: o["spec"].get("replicas") for o in rendered if is_deployment(o)
    }
    assert {name for name, count in counts.items() if count is None} == scaled


def is_deployment(each: dict) -> bool:
    return each["kind"] == "Deployment"
