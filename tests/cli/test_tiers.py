"""The command over a pool of several tiers: each tier is tried and shown, and none is forgotten."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from pdstore.cli.answer import Level
from pdstore.cli.doctor import check_tiers
from pdstore.cli.explained import explain
from pdstore.cli.listing import open_pool
from pdstore.errors import ConfigError, StoreFull
from pdstore.format import block
from pdstore.format.keys import PromptKeys, prefix_of
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.file.mount import Mount
from pdstore.store.optional import EvictsByUse, ListsValues, Promotes, tiers_of
from pdstore.testing.values import empty_slots, fresh_keys, put
from tests.support.command import PAYLOAD, run, run_json, save
from tests.support.kv import eventually


@pytest.fixture
def stack(tmp_path, prompts):
    """The URLs of an arena over files, with two prompts whose blocks are in both."""
    urls = f"shm://cli?size=64MiB&dir={tmp_path} file://{tmp_path}/below?budget=1GiB&copy=1GB/s"
    with contextlib.closing(open_store(urls, read_settings())) as store:
        for keys in prompts:
            save(store, keys)
        assert store.flush()
    return urls


def places_in(ran):
    """Returns what `explain` says about where blocks are, by runs of blocks."""
    (line,) = (
        line for line in ran.out.splitlines() if line.startswith("→ block") and ": in " in line
    )
    return line.removeprefix("→ ").rstrip().split("; ")


def load(store, keys):
    """Loads small values of a prompt as a worker does: it promotes what it has read below."""
    size = block.HEADER_BYTES + PAYLOAD
    slots = empty_slots([size] * len(keys))
    assert store.get(keys, slots) == len(keys)
    store.optional(Promotes).promote(keys, slots)


def keys_in(urls):
    with contextlib.closing(open_store(urls, read_settings())) as store:
        return [
            {value.key for value in tier.optional(ListsValues).stored_values()}
            for tier in tiers_of(store)
        ]


def test_doctor_tries_each_tier(stack, tmp_path):
    document = run_json("doctor", "--store", stack, PD_TRANSFER_VIA_STORAGE="1")
    said = {each["subject"]: each for each in document["findings"]}
    assert said["round trip"]["level"] == said["tier 1: round trip"]["level"] == "ok"
    options = "each process copies up to 1000 MB/s to it (copy), and a search of it waits up to"
    assert said["tier 1"]["said"] == f"file://{tmp_path}/below: {options} 100 ms (look)"
    for subject in ("speed", "tier 1: speed"):
        assert re.search("every byte is right; find .*, load [0-9.]+ GB/s", said[subject]["said"])
    assert "1.0GiB" in said["tier 1: room"]["said"]
    assert "P and D meet in shm://cli" in said["tiers"]["said"]
    above, below = keys_in(stack)
    assert len(below) == 4, "the blocks of both prompts, and nothing of the trial"
    assert below < above


def test_doctor_tells_what_should_change_at_which_tier(tmp_path):
    urls = f"file://{tmp_path}/above file://{tmp_path}/below?budget=9000TiB&look=50ms"
    document = run_json("doctor", "--store", urls, PD_TRANSFER_VIA_STORAGE="1")
    said = {each["subject"]: each for each in document["findings"]}
    assert "are on one file system" in said["tiers: one disk"]["said"]
    assert said["tiers: one disk"]["level"] == "warn"
    assert said["tier 1: budget"]["level"] == "warn"
    assert "waits up to 50 ms (look)" in said["tier 1"]["said"]
    told = [each for each in document["findings"] if each["subject"] == "tier 1: budget"]
    assert len(told) == 1, "told once, for its own tier"


@pytest.mark.misconfiguration("a disk of each host below a first tier that hosts share")
def test_doctor_tells_of_a_hosts_own_directory_below_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr("pdstore.store.tiers.places.mount_of", lambda path: Mount("xfs", set()))
    settings = read_settings(store=f"redis://192.0.2.1:1?timeout=0.2 file://{tmp_path}/below")
    with contextlib.closing(open_store(settings.store, settings)) as store:
        found = {each.subject: each for each in check_tiers(settings, store, None)}
    assert "is a directory of this host alone (xfs)" in found["tiers: own directory"].said
    assert found["tiers: own directory"].level is Level.WARN


def test_doctor_names_the_first_tier_as_it_is_called_before_there_is_one(tmp_path):
    urls = f"shm://unopened?size=64MiB&dir={tmp_path} file://{tmp_path}/below"
    document = run_json("doctor", "--store", urls, PD_TRANSFER_VIA_STORAGE="1")
    (said,) = (each["said"] for each in document["findings"] if each["subject"] == "tiers")
    assert said.startswith("P and D meet in shm://unopened;")


def test_doctor_names_a_tier_that_is_away(tmp_path):
    urls = f"file://{tmp_path}/pool?budget=9GiB redis://127.0.0.1:1"
    ran = run("doctor", "--store", urls)
    assert ran.status == 1
    (line,) = (line for line in ran.out.splitlines() if line.startswith("✗  tier 1"))
    assert "127.0.0.1:1" in ran.out
    assert "connect" in line
    assert "Connection refused" in line


@pytest.fixture
def half_dead(stack):
    """The URLs of the stack, and of a server that is away between its tiers."""
    first, last = stack.split(" ")
    return f"{first} redis://127.0.0.1:1 {last}"


SILENT = "tier 1 did not answer: redis://127.0.0.1:1"


def test_du_and_ls_show_the_tiers_that_answer_and_name_the_one_that_does_not(half_dead, tmp_path):
    for command in (("du",), ("ls", "--limit", "0")):
        ran = run(*command, "--store", half_dead)
        assert ran.status == 1
        (line,) = (line for line in ran.out.splitlines() if line.startswith(SILENT))
        assert "Connection refused" in line
        (said,) = run_json(*command, "--store", half_dead)["problems"]
        assert said == line.rstrip()
    document = run_json("du", "--store", half_dead)
    assert [use["blocks"] for use in document["namespaces"]] == [2, 2]
    assert [tier["room"] is None for tier in document["tiers"]] == [False, True, False]
    ran = run("du", "--store", half_dead)
    assert f"file://{tmp_path}/below: " in ran.out
    assert not any(line.startswith("redis://") for line in ran.out.splitlines())
    assert document["tiers"][1]["namespaces"] is None, "unknown, and not nothing"


def test_ls_finds_what_is_only_below_the_tier_that_does_not_answer(half_dead, stack):
    _, below = keys_in(stack)
    with contextlib.closing(open_store(stack.partition(" ")[0], read_settings())) as arena:
        arena.remove(list(below))
    listed = run_json("ls", "--store", half_dead, "--limit", "0")
    assert below <= {value["key"] for value in listed["values"]}


def test_no_tier_can_be_listed_if_the_first_is_away(tmp_path):
    (tmp_path / "below").mkdir()
    ran = run("du", "--store", f"redis://127.0.0.1:1 file://{tmp_path}/below")
    assert ran.status == 2
    assert "Connection refused" in ran.err


def test_purge_clears_what_answers_and_says_what_to_do_about_the_rest(half_dead, stack, prompts):
    one = prompts[0].namespace.hex
    rehearsed = run("purge", "--namespace", one, "--dry-run", "--store", half_dead)
    assert rehearsed.status == 1
    assert SILENT in rehearsed.out
    ran = run("purge", "--namespace", one, "--store", half_dead, "--yes")
    assert ran.status == 2
    assert "redis://127.0.0.1:1" in ran.err
    assert "Connection refused" in ran.err
    assert "purge again when it answers" in ran.err
    for keys in keys_in(stack):
        assert not any(key.startswith(prefix_of(one)) for key in keys)
    unknown = run("purge", "--namespace", "0", "--store", half_dead, "--yes")
    assert SILENT in unknown.err, "what is not found may be there"


def test_du_counts_a_value_once_and_shows_the_room_of_each_tier(stack, tmp_path):
    document = run_json("du", "--store", stack)
    assert [use["blocks"] for use in document["namespaces"]] == [2, 2]
    assert [tier["store"] for tier in document["tiers"]] == [
        "shm://cli",
        f"file://{tmp_path}/below",
    ]
    assert [tier["room"]["capacity_bytes"] for tier in document["tiers"]] == [64 << 20, 1 << 30]
    lines = run("du", "--store", stack).out.splitlines()
    assert sum("% of" in line for line in lines) == 2


def test_du_shows_by_tier_what_it_shows_of_one_store(stack, prompts):
    one, other = (keys.namespace.hex for keys in prompts)
    above, _ = keys_in(stack)
    first, _, below = stack.partition("&copy")[0].partition(" ")
    with contextlib.closing(open_store(first, read_settings())) as arena:
        arena.remove([key for key in above if other in key])
    tiers = run_json("du", "--store", stack)["tiers"]
    counts = [
        {use["namespace"]: (use["blocks"], use["tails"]) for use in tier["namespaces"]}
        for tier in tiers
    ]
    assert counts == [{one: (2, 1)}, {one: (2, 0), other: (2, 0)}]
    for tier, url in zip(tiers, (first, below), strict=True):
        alone = run_json("du", "--store", url)
        assert [use["bytes"] for use in tier["namespaces"]] == [
            use["bytes"] for use in alone["namespaces"]
        ]
    lines = [line.split() for line in run("du", "--store", stack).out.splitlines()]
    rows = [(line[0], line[2:4]) for line in lines if line and line[0] in (one[:12], other[:12])]
    assert sorted(rows[2:]) == sorted(
        [(one[:12], ["2", "1"]), (one[:12], ["2", "0"]), (other[:12], ["2", "0"])]
    )


def test_ls_and_inspect_see_what_is_only_below(stack, prompts):
    above, below = keys_in(stack)
    first = stack.partition(" ")[0]
    with contextlib.closing(open_store(first, read_settings())) as arena:
        arena.remove(list(below))
    listed = run_json("ls", "--store", stack, "--limit", "0")
    assert {value["key"] for value in listed["values"]} == above
    for key in below:
        assert run_json("inspect", "--store", stack, key)["verdict"] == "right"


def test_explain_says_in_which_tier_each_block_is(stack, prompts):
    keys = prompts[0].store_keys(prompts[0].namespace.parts)
    ids = ("explain", "--ids", ",".join(map(str, range(40))), "--store", stack)
    ids += ("--namespace", prompts[0].namespace.hex)
    first = stack.partition(" ")[0]
    with contextlib.closing(open_store(first, read_settings())) as arena:
        arena.remove([keys[1]])
    assert places_in(run(*ids)) == [
        "block 0: in shm:// and file://",
        "block 1: in file://, promoted at the next load",
        "block 2: in shm://",
    ]
    document = run_json(*ids)
    assert document["tiers"] == ["shm://", "file://"]
    assert [block["tiers"] for block in document["blocks"]] == [[0, 1], [1], [0]]
    promotions = [block["promotion"] for block in document["blocks"]]
    assert promotions == [None, "promoted at the next load", None]
    with contextlib.closing(open_store(stack, read_settings())) as store:
        load(store, keys[:2])
    assert places_in(run(*ids))[0] == "blocks 0-1: in shm:// and file://", "as it has said"


def test_explain_names_the_oldest_block_of_a_first_tier_that_is_full(tmp_path, prompts):
    first = f"shm://full?size=8MiB&lease=0.1&dir={tmp_path}"
    urls = f"{first} file://{tmp_path}/below"
    (tmp_path / "below").mkdir()
    with contextlib.closing(open_store(f"file://{tmp_path}/below", read_settings())) as below:
        save(below, prompts[0], stop=2)
    with contextlib.closing(open_store(first, read_settings())) as arena:
        with contextlib.suppress(StoreFull):
            while True:
                put(arena, fresh_keys(64), [bytes(PAYLOAD)] * 64)
        by_use = arena.optional(EvictsByUse)
        eventually(lambda: by_use.oldest_age_s([PAYLOAD] * 2) is not None)  # leases have ended
    ids = ("explain", "--ids", ",".join(map(str, range(32))), "--store", urls)
    ids += ("--namespace", prompts[0].namespace.hex)
    (said,) = places_in(run(*ids))
    oldest = "the oldest block of shm://, unused for [0-9]+ s"
    assert re.fullmatch(
        f"blocks 0-1: in file://, promoted at the next load if it is worth more than {oldest}", said
    )


def test_explain_promises_no_promotion_behind_a_block_that_is_missing(stack, prompts):
    keys = prompts[0].store_keys(prompts[0].namespace.parts)
    first = stack.partition(" ")[0]
    with contextlib.closing(open_store(first, read_settings())) as arena:
        arena.remove(keys[:2])
    with contextlib.closing(open_store(stack, read_settings())) as store:
        store.remove(keys[:1])
    ids = ("explain", "--ids", ",".join(map(str, range(40))), "--store", stack)
    ids += ("--namespace", prompts[0].namespace.hex)
    assert places_in(run(*ids)) == ["block 1: in file://", "block 2: in shm://"]


def test_explain_tells_of_the_purge_that_keeps_blocks_below(stack, prompts):
    namespace = prompts[0].namespace.hex
    other = stack.replace("shm://cli", "shm://other")
    with contextlib.closing(open_store(other, read_settings())) as store:
        save(store, prompts[0])
    run_json("purge", "--store", stack, "--namespace", namespace, "--yes")
    below = stack.partition(" ")[2].partition("&")[0]
    first = other.partition(" ")[0]
    with (
        contextlib.closing(open_store(below, read_settings())) as files,
        contextlib.closing(open_store(first, read_settings())) as arena,
    ):
        save(files, prompts[0], stop=1)
        arena.remove(prompts[0].store_keys(prompts[0].namespace.parts, 0, 1))
    ids = ("explain", "--ids", ",".join(map(str, range(40))), "--store", other)
    ran = run(*ids, "--namespace", namespace)
    assert places_in(ran)[0] == "block 0: in file://, not promoted, because of a purge"
    assert f"`pdstore purge --namespace {namespace}` is run here" in " ".join(ran.out.split())


def test_explain_names_a_tier_that_does_not_answer(half_dead):
    ran = run("explain", "--ids", ",".join(map(str, range(40))), "--store", half_dead)
    assert SILENT in ran.out


def test_explain_tells_runs_of_blocks_and_tiers_of_one_scheme_apart(tmp_path, prompts):
    above, below = (f"file://{tmp_path}/{name}" for name in ("above", "below"))
    long = PromptKeys(prompts[0].namespace).extend(range(16 * 20))
    for url, stop in ((above, 12), (below, 20)):
        with contextlib.closing(open_store(url, read_settings())) as store:
            save(store, long, stop=stop)
    ids = ",".join(map(str, range(16 * 20)))
    shown = explain(f"{above} {below}", ids=ids).shown
    said = f"blocks 12-19: in {below}, promoted at the next load"
    assert f"→ blocks 0-11: in {above} and {below}; {said}" in shown


def test_explain_of_one_store_names_no_tier(tmp_path, prompts):
    url = f"file://{tmp_path}/alone"
    with contextlib.closing(open_store(url, read_settings())) as store:
        save(store, prompts[0])
    answer = run_json("explain", "--ids", ",".join(map(str, range(40))), "--store", url)
    assert answer["tiers"] == []
    assert all(block["tiers"] == [] for block in answer["blocks"])


def test_purge_reaches_each_tier(stack, prompts):
    one, other = (keys.namespace.hex for keys in prompts)
    run("purge", "--namespace", one, "--store", stack, "--yes")
    for keys in keys_in(stack):
        assert not any(key.startswith(f"pds1:{one}:") for key in keys)
        assert any(other in key for key in keys)


@pytest.mark.parametrize("there", ["neither", "above"])
def test_looking_makes_no_tier(tmp_path, there):
    first = f"shm://cli?size=8MiB&dir={tmp_path}"
    if there == "above":
        open_store(first, read_settings()).close()
    before = [*tmp_path.iterdir()]
    with (
        pytest.raises(ConfigError, match="there is no pool in"),
        open_pool(f"{first} file://{tmp_path}/below"),
    ):
        pass
    assert [*tmp_path.iterdir()] == before
    assert not Path(tmp_path, "below").exists()


def test_a_purge_is_told_by_the_number_that_it_leaves(stack, prompts):
    namespace = prompts[0].namespace.hex
    run_json("purge", "--store", stack, "--namespace", namespace, "--yes")
    listed = run_json("ls", "--store", stack, f"purge:{namespace}")
    assert [value["kind"] for value in listed["values"]] == ["purge"] * 2
    inspected = run_json("inspect", "--store", stack, f"pds1:purge:{namespace}:2")
    assert inspected["verdict"] == "right"
    (use,) = run_json("du", "--store", stack)["namespaces"]
    assert use["namespace"] != namespace, "the numbers are none of its values"


def test_doctor_tells_of_a_purge_on_another_host(stack, prompts, tmp_path):
    namespace = prompts[0].namespace.hex
    other = stack.replace("shm://cli", "shm://other")
    with contextlib.closing(open_store(other, read_settings())) as store:
        save(store, prompts[0])
    run_json("purge", "--store", stack, "--namespace", namespace, "--yes")
    told = {}
    for urls in (stack, other):
        document = run_json("doctor", "--store", urls, PD_TRANSFER_VIA_STORAGE="1")
        told[urls] = [each for each in document["findings"] if each["subject"] == "tier 1: purge"]
    assert told[stack] == []
    (said,) = told[other]
    assert said["level"] == "warn"
    assert f"pdstore purge --namespace {namespace}" in said["remedy"]
    new = run_json(
        "doctor", "--store", stack.replace("//cli", "//new"), PD_TRANSFER_VIA_STORAGE="1"
    )
    assert not [each for each in new["findings"] if each["subject"] == "tier 1: purge"]
