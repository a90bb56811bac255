"""`pdstore top` reads real /metrics pages of an instance, once and again and again."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from tests.support.child import child
from tests.support.command import run, run_json


@pytest.fixture
def instance():
    """Metrics of an instance, and the URL that shows them."""
    metrics = Metrics()
    server, thread = start_http_server(0, "127.0.0.1", metrics.registry)
    yield metrics, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_totals_are_those_of_the_instance(instance):
    metrics, url = instance
    metrics.misses.labels(Reason.ABSENT.value).inc(3)
    metrics.tokens.labels("requested").inc(200)
    metrics.tokens.labels("matched").inc(150)
    metrics.bytes.labels("load").inc(200 << 10)
    document = run_json("top", url)
    [found] = document["instances"]
    assert found["misses"] == {"absent": 3}
    assert found["tokens"] == {"requested": 200, "matched": 150}
    ran = run("top", url, "--once")
    assert ran.status == 0
    assert {"75%", "absent", "3"} <= set(ran.out.split())
    assert "200 KiB" in ran.out


def test_an_instance_that_is_away_is_red_and_status_1():
    ran = run("top", "http://127.0.0.1:9", "--once")
    assert ran.status == 1
    assert "away" in ran.out


def test_a_page_of_something_else_is_red_and_status_1():
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    ran = run("top", f"http://127.0.0.1:{server.server_port}", "--once")
    server.shutdown()
    server.server_close()
    thread.join()
    assert ran.status == 1
    assert "name P or D" in " ".join(ran.out.split())


def test_on_a_terminal_it_goes_on_until_ctrl_c(instance):
    _, url = instance
    ours, theirs = pty.openpty()
    with child(
        [sys.executable, "-m", "pdstore", "top", url, "--every", "0.1"],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"instance") < 3:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, err) == (0, b"")
