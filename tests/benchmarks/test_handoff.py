"""The hand-off benchmark's report: loads that never began before `done` are named."""

from __future__ import annotations

import math

from benchmarks.handoff.measure import Sample
from benchmarks.handoff.report import late_stores, rows_of, table

LEADS = [
    {"store": "shm", "tokens": 64, "lead_s": [-0.1, 0.02, -0.3]},
    {"store": "redis", "tokens": 64, "lead_s": [-0.1, -math.inf, 0.0]},
]


def test_a_store_over_which_no_load_began_early_is_late():
    assert late_stores(LEADS) == ["redis"]
    assert late_stores(LEADS[:1]) == late_stores([]) == []


def test_the_table_shows_the_controls_and_how_early_each_load_began():
    found = {"rows": [], "alone_prefill_s": {64: [0.1, 0.3, 0.2]}, "bursts": [], "leads": LEADS[:1]}
    found["idle_connector_prefill_s"] = {64: [0.21]}
    assert "without a pool: 200.0 ms, by one whose connector does nothing 210.0" in table(found)
    assert "began before P's `done` by -100.0, 20.0, -300.0 ms" in table(found)


def test_rows_come_by_length_store_and_mode_whatever_was_asked_first():
    kinds = [("shm", "settled", 64), ("shm", "relayed", 64), ("file", "settled", 64)]
    kinds += [("shm", "relayed", 32), *kinds]
    samples = [
        Sample(*kind, exposed_s=i, ttft_s=i, prefill_s=i, d_computed=1, is_same=None, reason=None)
        for i, kind in enumerate(kinds)
    ]
    rows = rows_of(samples)
    assert [(r["store"], r["mode"], r["tokens"]) for r in rows] == [
        ("shm", "relayed", 32),
        ("file", "settled", 64),
        ("shm", "relayed", 64),
        ("shm", "settled", 64),
    ]
    assert rows[1]["exposed_s_range"] == [2, 6]
