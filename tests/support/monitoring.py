"""Monitoring: a real Prometheus and a real Alertmanager that watch registries of this process."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, start_http_server

from examples.ports import free_port
from tests.support.mini_engine_kit import until

_RANGE = "10s"  # for $__rate_interval: ten scrapes


@dataclass
class Monitoring:
    """The URLs of a Prometheus and of the Alertmanager that it tells."""

    client: httpx.Client
    prometheus: str
    alertmanager: str

    def query(self, expression: str) -> list[dict]:
        """Returns the series of a query, with the dashboard's variables filled in."""
        text = expression.replace("$__rate_interval", _RANGE).replace("$instance", ".*")
        answer = self.client.get(f"{self.prometheus}/api/v1/query", params={"query": text})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]["result"]

    def alerts(self) -> set[str]:
        """Returns the names of the alerts that have reached the Alertmanager."""
        found = self.client.get(f"{self.alertmanager}/api/v2/alerts").json()
        return {alert["labels"]["alertname"] for alert in found}


@contextlib.contextmanager
def monitoring(
    scratch: Path, rules: Path, registries: dict[str, CollectorRegistry]
) -> Iterator[Monitoring]:
    """Scrapes and evaluates every second; an alert's `for` is a second, too.

    registries: by the name that they get as their `instance`.
    """
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=5.0))

        def start(program: str, config: dict, *options: str) -> str:
            """Starts a server, waits until it is ready, and has it killed at the end."""
            file, port = scratch / f"{program}.yaml", free_port()
            file.write_text(json.dumps(config))  # which is YAML, too
            address = f"--web.listen-address=127.0.0.1:{port}"
            command = [program, f"--config.file={file}", address, *options]
            log = stack.enter_context((scratch / f"{program}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 10)
            stack.callback(process.kill)

            def is_ready() -> bool:
                assert process.poll() is None, Path(log.name).read_text()
                with contextlib.suppress(httpx.TransportError):
                    return client.get(f"http://127.0.0.1:{port}/-/ready").status_code == 200
                return False

            until(is_ready)
            return f"127.0.0.1:{port}"

        targets = []
        for name, registry in registries.items():
            server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            address = f"127.0.0.1:{server.server_port}"
            targets.append({"targets": [address], "labels": {"instance": name}})
        quick = scratch / "rules.yaml"
        quick.write_text(rules.read_text().replace("for: 15s", "for: 1s"))
        nobody = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}
        alerts = f"--storage.path={scratch / 'alerts'}", "--cluster.listen-address="
        alertmanager = start("prometheus-alertmanager", nobody, *alerts)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(quick)],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [{"job_name": "pdstore", "static_configs": targets}],
        }
        prometheus = start("prometheus", config, f"--storage.tsdb.path={scratch / 'tsdb'}")
        yield Monitoring(client, f"http://{prometheus}", f"http://{alertmanager}")
