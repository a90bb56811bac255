"""Reporting: nothing unless it is asked for; a page with a port of its own; spans to a receiver."""

from __future__ import annotations

import threading

import httpx
import pytest

from examples.ports import free_port
from pdstore.errors import Reason
from pdstore.metrics import Metrics
from pdstore.settings import read_settings
from pdstore.status.server import Reporting
from tests.status.test_snapshot import CACHE


@pytest.fixture
def report(closed_after):
    def report(registries=(), number=0, **settings):
        asked = read_settings(store="memory://", **settings)
        reporting = Reporting(asked, CACHE, registries, lambda: None, number)
        return closed_after(closed_after(reporting))  # twice

    return report


def test_without_the_settings_there_is_no_page(report):
    assert report().url is None


def test_instances_of_one_environment_have_pages_beside_each_other(report):
    port = free_port()
    assert report(status_port=port - 1, number=1).url == f"http://127.0.0.1:{port}"
    assert report(status_port=0, number=1).url is not None


@pytest.mark.misconfiguration("a port that is taken")
def test_a_port_that_cannot_be_opened_costs_the_page_and_not_the_start(report, caplog):
    port = int(report(status_port=0).url.rpartition(":")[2])
    before = set(threading.enumerate())
    second = report(status_port=port)
    assert second.url is None
    assert f"PDSTORE_STATUS_PORT={port}: " in caplog.text
    assert report(status_port=65535, number=1).url is None
    assert "PDSTORE_STATUS_PORT=65536: " in caplog.text
    assert set(threading.enumerate()) <= before


def test_the_page_adds_up_the_numbers_of_several_registries(report):
    scheduler, worker = Metrics(), Metrics()
    scheduler.miss(Reason.LOST)
    worker.miss(Reason.LOST)
    for each in (scheduler, worker):
        each.store_used_bytes.set(7)
        each.jobs_alive.set(2)
    page = report([scheduler.registry, worker.registry], status_port=0)
    shown = httpx.get(f"{page.url}/pdstore", trust_env=False).json()["metrics"]
    assert shown["misses_total|lost"] == 2
    assert shown["jobs_alive"] == 4
    assert shown["store_used_bytes"] == 7, "both look at the same store"
