"""deploy/: each name and option in it exists in the program that it is for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pdstore.settings import Settings, variable_of
from tests.deploy.commands import DEPLOY, ROOT, commands_of, options_of, services, variables

KINDS_WITH_PODS = ("Deployment", "StatefulSet")


def test_every_variable_is_a_setting():
    assert variables() >= {"PD_TRANSFER_VIA_STORAGE", "PDSTORE_STORE", "PDSTORE_ROLE"}
    assert variables() <= {variable_of(field) for field in Settings.model_fields}


@pytest.mark.parametrize("module", ["pdstore.router", "examples.mini_engine"])
def test_every_option_of_our_programs_is_one(module):
    text = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    known = set(re.findall(r"--[a-z-]+", text))
    script = module.replace(".", "-")  # pdstore-router
    used = [options_of(each) for name in (module, script) for each in commands_of(name)]
    assert used
    assert set().union(*used) - known == set()


@pytest.mark.parametrize("program", ["mooncake_master", "mooncake_client"])
def test_mooncakes_flags_are_those_of_the_example_script(program):
    script = (ROOT / "examples" / "run_mooncake.sh").read_text()
    used = commands_of(program)
    assert len(used) == 3  # systemd, compose, Kubernetes
    for arguments in used:
        assert all(f"{option}=" in script for option in options_of(arguments))
        for fixed in (a for a in arguments if re.fullmatch(r"--[a-z_]+=[\d.]+", a)):
            assert fixed in script or options_of([fixed]) <= {
                *("--rpc_address", "--host", "--rpc_port", "--port"),
                *("--metrics_port", "--rpc_thread_num"),
            }


def test_every_image_is_a_target_of_the_dockerfile_or_a_known_one():
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    targets = re.findall(r"^FROM .* AS ([a-z]+)$", dockerfile, re.MULTILINE)
    texts = [path.read_text() for path in DEPLOY.rglob("*.yaml")]
    images = {image for text in texts for image in re.findall(r"image: ([\w./-]+)", text)}
    assert {f"pdstore-{target}" for target in targets if target != "wheel"} <= images
    foreign = {"redis", "prom/prometheus", "prom/alertmanager", "grafana/grafana"}
    assert images <= {f"pdstore-{target}" for target in targets} | foreign


def extras_of_images() -> list[set[str]]:
    """The extras of pdstore in each image: those of the router's, and of vLLM's."""
    installed = re.findall(r"\$\{wheel\}\[([\w,-]+)\]", (DEPLOY / "Dockerfile").read_text())
    assert len(installed) == 2
    return [set(extras.split(",")) for extras in installed]


def test_every_image_has_the_command():
    assert all("cli" in extras for extras in extras_of_images())


def test_every_extra_of_an_image_is_one():
    """Of one that is none, pip only warns."""
    project, _, _ = (ROOT / "pyproject.toml").read_text().partition("[project.urls]")
    known = set(re.findall(r"^([\w-]+) = \[", project.partition("optional-dependencies]")[2], re.M))
    for extras in extras_of_images():
        assert extras <= known


def test_the_routers_image_has_what_router_and_mini_engine_need():
    router, _ = extras_of_images()
    assert "router" in router
    dockerfile = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    [program] = re.findall(r"python -c '(.*?)' > /wheels/examples.txt", dockerfile)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "transformers" in done.stdout, done.stderr
    assert "-r /wheels/examples.txt" in dockerfile


def test_no_image_runs_as_root():
    _, *stages = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")
    to_run = [stage for stage in stages if " AS wheel\n" not in stage]
    assert len(to_run) == 2
    assert all("\nUSER 10001\n" in stage for stage in to_run)


def pods() -> list[dict]:
    paths = DEPLOY.glob("kustomize/**/*.yaml")
    objects = [o for path in paths for o in yaml.safe_load_all(path.read_text())]
    return [o["spec"]["template"]["spec"] for o in objects if o.get("kind") in KINDS_WITH_PODS]


def test_no_pod_has_rights_that_its_user_would_not_get():
    assert len(pods()) == 6
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert not rights["allowPrivilegeEscalation"]


def test_no_pod_gets_variables_of_services():
    """A Service called pdstore-* would set variables that look like settings."""
    assert [pod.get("enableServiceLinks") for pod in pods()] == [False] * 6


def test_prometheus_asks_services_of_compose_and_has_the_alerts():
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    config = yaml.safe_load(text)
    [job] = config["scrape_configs"]
    targets = [t for group in job["static_configs"] for t in group["targets"]]
    assert {target.partition(":")[0] for target in targets} == {"prefill", "decode", "router"}
    assert {target.partition(":")[0] for target in targets} <= set(services())
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    mounted = mounts_of("prometheus")["/etc/prometheus"]
    [option] = [o for o in services()["prometheus"]["command"] if o.startswith("--config.file=")]
    assert option == "--config.file=/etc/prometheus/prometheus.yaml"
    assert (mounted / "prometheus.yaml").exists()


def test_grafana_is_given_the_dashboard_and_its_prometheus():
    mounted = mounts_of("grafana")
    provisioning = mounted["/etc/grafana/provisioning"]
    [source] = read(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    [provider] = read(provisioning / "dashboards" / "pdstore.yaml")["providers"]
    [dashboard] = [path for path in mounted if path.endswith(".json")]
    assert dashboard.startswith(provider["options"]["path"] + "/")
    assert mounted[dashboard] == DEPLOY / "grafana" / "pdstore.json"


def mounts_of(service: str) -> dict[str, Path]:
    """The mounted file or folder of each path in a service's container; all must be there."""
    parts = [volume.split(":") for volume in services()[service]["volumes"]]
    found = {target: (DEPLOY / source).resolve() for source, target, _ in parts}
    assert all(path.exists() for path in found.values())
    return found


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())
