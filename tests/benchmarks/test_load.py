"""The load benchmark: its workloads are drawn from a seed, and it says what it cannot do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.load.kinds import Disk, kinds
from benchmarks.load.workloads import WORKLOADS, Plan, Sizes
from pdstore.settings import read_settings
from pdstore.store import open_store
from tests.support.disk import disk as disk


class Listener:
    """Answers at once, and keeps what it was asked; the question that is too many has no answer."""

    def __init__(self, most=40):
        self.asked, self.now, self._most = [], 0.0, most
        self.gate, self.has_enough = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def ask(self, prompt, max_tokens, turn=0):
        if len(self.asked) == self._most:
            self.has_enough.set()
            await asyncio.Event().wait()
        self.now += 0.01
        self.asked.append((turn, tuple(prompt)))
        return [1] * max_tokens


def asked_by(name, trace=None, seed=1):
    sizes = replace(WORKLOADS[name].sizes.shrunk(), think_s=(0.0, 0.0), users=2, rate=1e4)

    async def ask():
        listener = Listener()
        asking = asyncio.create_task(WORKLOADS[name].run(listener, Plan(sizes, seed, trace)))
        await listener.has_enough.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return listener.asked

    return sizes, asyncio.run(ask())


@pytest.fixture
def trace(tmp_path):
    blocks = [[1, 2], [1, 2, 3], [4]]
    lines = [
        {"timestamp": n, "input_length": 300 * len(ids), "output_length": 9, "hash_ids": ids}
        for n, ids in enumerate(blocks * 20)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_drawn_from_its_seed_and_fits_the_engine(name, trace):
    sizes, asked = asked_by(name, trace)
    assert asked
    assert all(len(prompt) + sizes.answer <= sizes.longest + 1024 for _, prompt in asked)
    assert set(asked_by(name, trace)[1]) & set(asked)
    assert not set(asked_by(name, trace, seed=2)[1]) & set(asked)


def test_a_turn_asks_with_all_that_was_said_before():
    _, asked = asked_by("turns")
    longest = max(asked, key=lambda each: each[0])[1]
    before = [prompt for turn, prompt in asked if turn == 0 and longest[: len(prompt)] == prompt]
    assert len(before) == 1


def test_users_leave_after_their_questions_and_others_bring_other_documents():
    sizes, asked = asked_by("leave")
    first = [prompt[sizes.system :] for turn, prompt in asked if turn == 0]
    assert len(set(first)) == len(first) > sizes.users
    assert {turn for turn, _ in asked} == set(range(4))


def test_nothing_is_shared_where_it_says_so():
    _, asked = asked_by("unique")
    assert len({prompt[:16] for _, prompt in asked}) == len(asked)


def test_prompts_share_what_a_traces_ids_say(trace):
    _, asked = asked_by("trace", trace)
    assert len({prompt[:300] for _, prompt in asked}) == 2


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--workload", "pd"], 0, "which --trace FILE names: pd"),
        (["--cpu", "--json", "turns.json"], 1, "a name with `load` in it"),
        (["--cpu", "--engine", "vllm", "--kinds", "shm@old"], 1, "--trees names no old"),
        (["--cpu", "--kinds", "swift"], 1, "swift: no such kind"),
        (["--cpu", "--workload", "turns", "fits"], 1, "give --gpu and --pool-gib"),
        (["--document", "30000", "--workload", "leave"], 1, "room for 28416 tokens"),
        (["--beside", "--kinds", "lmcache", "lmcache_pd"], 1, "would use the same ports"),
    ],
)
def test_what_it_cannot_do_is_one_line(options, status, said):
    command = [sys.executable, "-m", "benchmarks.load", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tiers", "tiers_direct"])
def test_tiers_are_the_arena_with_files_on_the_disk_below(name, tmp_path, disk):
    below_it = Disk(disk, 0.5, copy="2GB/s")
    [instance] = kinds(tmp_path, Sizes(pool_gib=0.125), {}, below_it)[name].instances
    first, below = instance.environment["PDSTORE_STORE"].split()
    assert first.startswith("shm://load?size=134217728&")
    assert below.startswith(f"file://{disk}/below?budget=536870912&")
    assert ("direct=1" in below) == (name == "tiers_direct")
    store = open_store(f"{first} {below}", read_settings(store=f"{first} {below}"))
    assert len(store.tiers) == 2
    store.close()


@pytest.mark.parametrize(("name", "is_direct"), [("lmcache_disk", False), ("lmcache_direct", True)])
def test_lmcache_is_told_the_same_disk(name, is_direct, tmp_path):
    kind = kinds(tmp_path, Sizes(), {}, Disk(tmp_path, 16.0))[name]
    option, given = kind.of_service
    below = json.loads(given)
    assert (kind.service, option) == ("lmcache", "--l2-adapter")
    assert (below["base_path"], below["max_capacity_gb"]) == (str(tmp_path), 16.0)
    assert below["eviction"], "without it the disk fills"
    assert below.get("use_odirect", False) == is_direct


@pytest.mark.nightly
def test_what_lies_in_a_lower_tier_is_counted_by_tier(tmp_path):
    file = tmp_path / "load.json"
    command = [sys.executable, "-m", "benchmarks.load", "--cpu", "--kinds", "shm", "tiers"]
    command += ["--beside", "--windows", "1", "--window", "4", "--warm", "2", "--users", "4"]
    command += ["--document", "300", "--questions", "3", "--gpu", "2048", "--pool-gib", "0.01"]
    subprocess.run(
        [*command, "--disk", str(tmp_path), "--json", str(file)], check=True, timeout=120
    )
    by_kind = {row["kind"]: row for row in json.loads(file.read_text())["rows"]}
    assert all(row["answers/s"] > 0 and not row["errors"] for row in by_kind.values())
    assert "copied" in by_kind["tiers"]["by tier"]
    assert not by_kind["shm"]["by tier"]


@pytest.mark.nightly
def test_a_row_has_what_the_servers_of_its_window_counted(tmp_path):
    file = tmp_path / "load.json"
    command = [sys.executable, "-m", "benchmarks.load", "--cpu", "--workload", "leave", "--anew"]
    command += ["--kinds", "shm", "--windows", "2", "--window", "3", "--warm", "1"]
    command += ["--users", "2", "--document", "200", "--questions", "3", "--gpu", "2048"]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=120)
    rows = json.loads(file.read_text())["rows"]
    assert [row["window"] for row in rows] == [1, 2]
    assert all(row["answers/s"] > 0 and not row["errors"] for row in rows)
    assert all(row["saves"] and row["loaded"] for row in rows)
