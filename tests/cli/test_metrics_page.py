"""MetricsPage reads what pdstore's own registry writes, and vLLM's form of it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from prometheus_client import generate_latest

from pdstore.cli.metrics_page import MetricsPage
from pdstore.errors import StoreUnavailable
from pdstore.metrics import Metrics

TEXT = """
# TYPE pdstore_misses_total counter
pdstore_misses_total{reason="absent"} 3.0
pdstore_misses_total{reason="lost"} 0.0
pdstore_misses_total{reason="absent",engine="1"} 2.0
# TYPE other gauge
other 1.0
"""


def test_samples_are_summed_over_processes_and_by_label():
    page = MetricsPage(TEXT, 1.0)
    assert page.total("pdstore_misses_total") == 5
    assert page.total("pdstore_misses_total", engine="1") == 2
    assert page.by("pdstore_misses_total", "reason") == {"absent": 5}
    assert page.total("other") == 0


def test_the_names_are_those_of_the_registry():
    page = MetricsPage(generate_latest(Metrics().registry).decode(), 0.0)
    assert "absent" not in page.by("pdstore_misses_total", "reason")  # there, and 0
    assert page.total("pdstore_tokens_total", verb="requested") == 0


def test_a_server_of_something_else_is_an_error_with_the_address():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}/metrics"):
            MetricsPage.read(f"http://127.0.0.1:{port}")
        thread.join()


def test_nobody_there_is_an_error_with_the_address():
    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:9/metrics"):
        MetricsPage.read("http://127.0.0.1:9")
