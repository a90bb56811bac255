"""The benchmarks' commands."""

from __future__ import annotations

import asyncio
import importlib
import math
import subprocess
import sys

import pytest

from benchmarks import copies, direct
from benchmarks.command import run
from benchmarks.handoff.__main__ import parse
from benchmarks.handoff.recorder import WATCHED
from benchmarks.handoff.report import late_stores
from benchmarks.handoff.run import modes_of
from benchmarks.peers import peer_of
from benchmarks.report import Report
from tests.support.disk import disk as disk
from tests.support.overload import measure


@pytest.mark.misconfiguration("a benchmark's `--json` or `--directory` cannot be written")
def test_a_file_that_cannot_be_written_ends_it_before_it_has_measured(tmp_path):
    measured = []
    with pytest.raises(SystemExit, match="nowhere"):
        run(lambda: measured.append(1), tmp_path / "nowhere" / "x.json")
    assert not measured


@pytest.mark.misconfiguration("a benchmark's `--json` or `--directory` cannot be written")
def test_ctrl_c_is_no_traceback():
    def interrupted() -> Report:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run(interrupted, None)
    assert ended.value.code == 130


@pytest.mark.misconfiguration("a benchmark of GPUs without one")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["benchmarks.swap.bench"], "GPU"),
    ],
)
def test_what_a_benchmark_lacks_is_one_line(command, said):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("this machine has it")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", WATCHED)
def test_a_recorder_watches_functions_that_exist(place):
    module, _, path = place.partition(":")
    owner, _, function = path.partition(".")
    assert callable(getattr(getattr(importlib.import_module(module), owner), function))


LEADS = [
    {"store": "shm", "tokens": 64, "lead_s": [-0.1, 0.02, -0.3]},
    {"store": "redis", "tokens": 64, "lead_s": [-0.1, -math.inf, 0.0]},
]


def test_a_store_over_which_no_load_began_early_is_late():
    assert late_stores(LEADS) == ["redis"]
    assert late_stores(LEADS[:1]) == late_stores([]) == []


def test_the_mini_engine_has_no_connector_of_a_peer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["handoff", "--cpu", "--stores", "shm", "lmcache"])
    with pytest.raises(SystemExit):
        parse()
    assert "--engine vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("store", "modes"),
    [("shm", "relayed concurrent settled"), ("nixl", "relayed"), ("lmcache", "relayed settled")],
)
def test_each_store_is_asked_in_the_modes_that_it_has(store, modes):
    asked = ["relayed", "concurrent", "settled"]
    assert modes_of(f"{store} 64", asked) == modes.split()


def test_the_ends_of_nixl_have_ports_of_their_own():
    p, d = (peer_of("nixl", role) for role in ("kv_producer", "kv_consumer"))
    assert p.environment != d.environment
    assert p.environment.keys() == d.environment.keys()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_thousand_requests_at_64_at_a_time(tmp_path):
    found = asyncio.run(measure(tmp_path, 1000, 64))
    assert (found["right"], found["wrong"], found["lost"]) == (1000, 0, 0)
    assert found["prefill"]["saves"]["queue_full"] > 0
    assert found["decode"]["loads"]["queue_full"] > 0
    assert found["decode"]["load_s"]["all_below"] <= 5.0, "1 s to wait, 1 s to load, and to end"
    early, late = found["peak_mib_after_a_tenth"], found["peak_mib"]
    assert all(late[name] < early[name] + 64 for name in late), (early, late)


def test_direct_reads_without_fio_are_one_line_that_names_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["direct", "--directory", str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="fio is not installed: apt-get install fio"):
        direct.main()


def test_the_costs_of_tiers_are_those_of_values_that_lie_below(disk, tmp_path):
    report = copies.measure(tmp_path, disk, 1, 64 << 10, 4)
    rows = [dict(zip(report.columns, row, strict=True)) for row in report.rows]
    assert {row["way"] for row in rows} == {
        *("save", "save beside a copier", "copy down", "copy beside a loop"),
        *("get above", "get below", "promote"),
    }
    assert {row["lower tier"] for row in rows} == {"file", "file, direct=1"}
    assert all(row["GB/s"] > 0 and row["CPU s a GB"] > 0 for row in rows)
    assert list(disk.iterdir()) == [], "its files are removed"
