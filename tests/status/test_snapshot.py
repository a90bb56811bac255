"""Snapshot: settings with their origins, counts and reasons, and no secret."""

from __future__ import annotations

import json
from typing import NamedTuple

from pdstore.errors import Reason
from pdstore.format.keys import Namespace, Part
from pdstore.metrics import Metrics
from pdstore.settings import read_settings
from pdstore.status.server import settings_of, snapshot
from pdstore.telemetry.request_record import Journal
from tests.telemetry.test_request_record import RECORD


class Cache(NamedTuple):
    namespace: Namespace
    pool_id: bytes | None = None
    lease_s: float = 10.0


CACHE = Cache(Namespace({"weights": "w"}, (Part(0, 0),), block_tokens=16))


def test_settings_have_origins_and_no_secrets(monkeypatch):
    monkeypatch.setenv("PDSTORE_SALT", "tenant-secret")
    urls = {"store": "redis://me:password@there/0", "traces": "http://me:password@there:4318"}
    settings = read_settings(**urls)
    shown = {one["name"]: one for one in settings_of(settings)}
    assert shown["PDSTORE_SALT"]["origin"] == "environment"
    assert shown["PDSTORE_STORE"]["origin"] == "argument"
    assert shown["PDSTORE_STORE"]["value"] == "redis://me:***@there/0"
    assert shown["PDSTORE_WORKERS"]["origin"] == "default"
    assert "secret" not in json.dumps(shown)
    assert "password" not in json.dumps(shown) + repr(settings)


def test_a_snapshot_is_json_with_requests_counts_and_reasons():
    metrics, journal = Metrics(), Journal()
    metrics.miss(Reason.LOST)
    metrics.tokens.labels("loaded").inc(64)
    journal.add(RECORD)
    taken = snapshot(read_settings(), CACHE, [metrics.registry], journal, lambda: "down")
    said = json.loads(json.dumps(taken))
    assert said["problem"] == "down"
    assert said["metrics"]["tokens_total|loaded"] == 64
    assert said["metrics"]["queue_jobs|load"] == 0
    assert said["namespace"] == {"hex": CACHE.namespace.hex, "fields": {"weights": '"w"'}}
    assert set(said["reasons"]) == {"lost"}
    assert said["requests"][0]["request_id"] == "r-1"
