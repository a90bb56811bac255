"""Snapshot: settings with their origins, counts and reasons, and no secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from pdstore.errors import Reason
from pdstore.format.keys import Namespace, Part
from pdstore.metrics import Metrics, TierState
from pdstore.settings import read_settings
from pdstore.status.server import settings_of, snapshot
from pdstore.telemetry.request_record import Journal
from tests.telemetry.test_request_record import RECORD


class Cache(NamedTuple):
    namespace: Namespace
    pool_id: bytes | None = None
    lease_s: float = 10.0
    tiers: Sequence[TierState] = ()


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
    metrics.miss(Reason.ABSENT)
    metrics.tokens.labels("loaded").inc(64)
    journal.add(RECORD)
    taken = snapshot(read_settings(), CACHE, [metrics.registry], journal, lambda: "down")
    said = json.loads(json.dumps(taken))
    assert said["problem"] == "down"
    assert said["metrics"]["tokens_total|loaded"] == 64
    assert said["metrics"]["queue_jobs|load"] == 0
    assert said["namespace"] == {"hex": CACHE.namespace.hex, "fields": {"weights": '"w"'}}
    assert {reason: one["is_fault"] for reason, one in said["reasons"].items()} == {
        "absent": False,
        "lost": True,
    }
    assert said["requests"][0]["request_id"] == "r-1"
    assert said["tiers"] == []


def test_a_snapshot_tells_of_each_tier_what_all_processes_count():
    first = TierState("0 shm", "shm://pool")
    below = TierState("1 file", "file:///nvme", "the tier file:///nvme is left out", 5, {"lost": 1})
    scheduler, worker = Metrics(), Metrics()
    scheduler.add_tiers(lambda: [first, below])
    worker.add_tiers(lambda: [first, TierState("1 file", "file:///nvme", None, 7, {"copied": 4})])
    worker.tier_calls.labels("1 file", "put", "ok").inc(4)
    worker.tier_calls.labels("1 file", "get", "StoreTimeout").inc()
    worker.tier_bytes.labels("1 file", "save").inc(4096)
    for name, used in (("0 shm", 60), ("1 file", 70)):
        scheduler.tier_used_bytes.labels(name).set(used)
        scheduler.tier_capacity_bytes.labels(name).set(100)
    scheduler.tier_evictions.labels("0 shm").inc(3)
    cache = CACHE._replace(tiers=[first, below])
    registries = [scheduler.registry, worker.registry]
    taken = snapshot(read_settings(), cache, registries, Journal(), lambda: None)
    shm, file = json.loads(json.dumps(taken))["tiers"]
    assert (shm["name"], shm["store"], shm["is_out"]) == ("0 shm", "shm://pool", False)
    assert (shm["used_bytes"], shm["capacity_bytes"], shm["num_evicted"]) == (60, 100, 3)
    assert (shm["waiting_bytes"], shm["copies"], shm["calls"]) == (None, {}, {})
    assert (file["is_out"], file["problem"]) == (True, below.problem)
    assert (file["used_bytes"], file["waiting_bytes"]) == (70, 12)
    assert file["copies"] == {"copied": 4, "lost": 1}
    assert file["calls"] == {"put|ok": 4, "get|StoreTimeout": 1}
    assert file["bytes"] == {"save": 4096}
