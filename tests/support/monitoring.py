"""Monitoring: a real Prometheus and a real Alertmanager that watch registries of this process."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, start_http_server

from examples.ports import free_port
from tests.support.mini_engine_kit import until

_RANGE = "10s"  # for $__rate_interval: ten scrapes


class Monitoring:
    """Scrapes and evaluates every second; an alert's `for` is a second, too.

    registries: by the name that they get as their `instance`.
    """

    def __init__(
        self, scratch: Path, rules: Path, registries: dict[str, CollectorRegistry]
    ) -> None:
        self._scratch, self._rules, self._registries = scratch, rules, registries
        self._stack = contextlib.ExitStack()
        self._client = httpx.Client(trust_env=False, timeout=5.0)

    def __enter__(self) -> Monitoring:
        with self._stack:
            self._stack.enter_context(self._client)
            self._alertmanager = self._start_alertmanager()
            self._prometheus = self._start_prometheus()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def query(self, expression: str) -> list[dict]:
        """Returns the series of a query, with the dashboard's variables filled in."""
        text = expression.replace("$__rate_interval", _RANGE).replace("$instance", ".*")
        answer = self._client.get(f"{self._prometheus}/api/v1/query", params={"query": text})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]["result"]

    def alerts(self) -> set[str]:
        """Returns the names of the alerts that have reached the Alertmanager."""
        found = self._client.get(f"{self._alertmanager}/api/v2/alerts").json()
        return {alert["labels"]["alertname"] for alert in found}

    def _start_alertmanager(self) -> str:
        config = self._scratch / "alertmanager.yaml"
        config.write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
        port = free_port()
        return self._start(
            f"http://127.0.0.1:{port}",
            "prometheus-alertmanager",
            f"--config.file={config}",
            f"--storage.path={self._scratch / 'alerts'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        )

    def _start_prometheus(self) -> str:
        targets = ""
        for name, registry in self._registries.items():
            server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
            self._stack.callback(thread.join)
            self._stack.callback(server.server_close)
            self._stack.callback(server.shutdown)
            address = f"127.0.0.1:{server.server_port}"
            targets += f"      - {{targets: ['{address}'], labels: {{instance: {name}}}}}\n"
        rules, config = self._scratch / "rules.yaml", self._scratch / "prometheus.yaml"
        rules.write_text(self._rules.read_text().replace("for: 15s", "for: 1s"))
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: ['{rules}']\n"
            "alerting: {alertmanagers: [{static_configs: [{targets:"
            f" ['{self._alertmanager.removeprefix('http://')}']}}]}}]}}\n"
            f"scrape_configs:\n  - job_name: pdstore\n    static_configs:\n{targets}"
        )
        port = free_port()
        return self._start(
            f"http://127.0.0.1:{port}",
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={self._scratch / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        )

    def _start(self, url: str, *command: str) -> str:
        """Starts a server, waits until it is ready, and has it killed at the end."""
        log = self._stack.enter_context((self._scratch / f"{command[0]}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self._client.get(f"{url}/-/ready").status_code == 200
            assert process.poll() is None, Path(log.name).read_text()
            return False

        until(is_ready)
        return url
