"""The rules of deploy/mooncake.md that only a real Mooncake can show."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pdstore.cli.main import main
from pdstore.errors import StoreClosed, StoreFull
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.metrics import Metrics
from pdstore.store.base import Slots
from pdstore.store.connect import read_pool_id
from pdstore.store.mooncake.library import ABSENT, HALF_WRITTEN, Library, MooncakeConfig
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put, run_together
from tests.support.kv import eventually
from tests.support.mooncake_cluster import (
    DISCARD_S,
    LEASE_S,
    Cluster,
    half_write,
    master_of,
    put_bare,
    size_of,
    stopped,
    wait_until_it_serves,
)

pytestmark = pytest.mark.mooncake
SIZE = 4096


@pytest.fixture(scope="module")
def store(cluster):
    with cluster.open() as store:
        yield store


@pytest.fixture(scope="module")
def peer(cluster):
    with cluster.open() as peer:
        yield peer


def test_a_value_is_one_object_of_exactly_its_size(store):
    """Rule 1."""
    [key] = fresh_keys(1)
    put(store, [key], [content(key, 3 << 20)])
    assert size_of(store, key) == 3 << 20


def test_the_first_of_two_writers_wins_and_both_succeed(store, peer):
    """Rule 4: the second one's put says nothing about its own bytes."""
    keys = fresh_keys(16)
    values = [[content(key, 1 << 20, version) for key in keys] for version in (0, 1)]
    results = []
    run_together(
        lambda: results.append(put(store, keys, values[0])),
        lambda: results.append(put(peer, keys, values[1])),
    )
    assert results == [16, 16]
    for i, value in enumerate(get(store, keys, [1 << 20] * 16)):
        assert value in (values[0][i], values[1][i])


def test_a_writer_that_is_still_at_work_is_waited_for(cluster, store, peer):
    """Rule 4."""
    [key] = fresh_keys(1)
    value = content(key, 8 << 20)
    with stopped(cluster.holder):
        results = []

        def write_late():
            eventually(lambda: size_of(store, key) != ABSENT)
            cluster.holder.send_signal(signal.SIGCONT)
            results.append(put(store, [key], [value]))

        run_together(lambda: results.append(put(peer, [key], [value])), write_late)
    assert results == [1, 1]
    assert get(store, [key], [len(value)]) == [value]


def test_a_match_leases_what_it_found_and_one_window_behind_the_gap_at_most(store, peer):
    """Rule 6."""
    keys = fresh_keys(300)
    put_bare(peer, keys, Slots(memoryview(bytearray(SIZE)), SIZE, [0] * 300, [8] * 300))
    with master_of(peer) as raw:
        assert raw.batch_remove(keys[20:21], True) == [0]
    assert store.match(keys) == 20
    with master_of(store) as raw:
        codes = raw.batch_remove(keys, False)
    assert codes[:20] == [-706] * 20
    assert codes[32:] == [0] * (300 - 32), "never asked for, so not leased"


def test_a_leased_and_damaged_value_can_be_removed_and_written_again(store, peer):
    """Rule 5: the lease would protect the damage."""
    keys = fresh_keys(2)
    put(store, keys, [b"damaged"] * 2)
    assert peer.match(keys) == 2
    store.remove(keys)
    assert peer.match(keys) == 0
    assert put(peer, keys, [b"healed"] * 2) == 2
    assert get(store, keys, [6, 6]) == [b"healed"] * 2


def test_reads_that_outlive_their_lease_never_give_wrong_bytes(tmp_path):
    """Rule 5: with a lease of 5 ms and a pool that evicts all the time."""
    flags = ["--default_kv_lease_ttl=5", "--eviction_high_watermark_ratio=0.5"]
    with (
        contextlib.closing(Cluster(tmp_path, segment=16 << 20, flags=flags)) as cluster,
        cluster.open() as store,
        cluster.open() as peer,
    ):
        wait_until_it_serves(store)
        keys, size = fresh_keys(24), 1 << 20
        values = {key: content(key, size) for key in keys}
        batches = [keys[start : start + 4] for start in range(0, 24, 4)]
        num_read = 0

        def write():
            for batch in batches:
                with contextlib.suppress(StoreFull):
                    put(store, batch, [values[key] for key in batch])

        def read():
            nonlocal num_read
            for batch in batches:
                got = get(peer, batch, [size] * 4)
                num_read += len(got)
                assert got == [values[key] for key in batch[: len(got)]]

        run_together(write, read, deadline_s=30)
        eventually(lambda: write() or read() or num_read, 20)


def test_the_pools_id_is_the_same_for_all_and_cannot_be_evicted(store, peer):
    assert read_pool_id(store) == read_pool_id(peer)
    with master_of(store) as raw:
        assert raw.batch_is_exist([POOL_ID_KEY]) == [1]


def test_a_preferred_segment_is_what_puts_ask_for(cluster):
    """Rule 9."""
    library = Library(MooncakeConfig(master="m:1", prefer="10.0.0.9:1234"))
    config = library.put_config(is_pinned=False)
    assert (config.preferred_segment, config.replica_num) == ("10.0.0.9:1234", 1)
    with cluster.open(f"{cluster.url}&prefer=10.0.0.9:1234") as store:
        assert put(store, fresh_keys(1), [b"x"]) == 1, "and no error when it is not there"


LENDER = """
import sys, time
from tests.support.mooncake_cluster import wait_until_it_serves
from pdstore.settings import Settings
from pdstore.store import open_store
store = open_store(sys.argv[1], Settings())
wait_until_it_serves(store)
print("lends", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["SIGTERM", "exit"])
def test_a_process_that_lends_memory_takes_it_back_when_it_ends(tmp_path, end):
    """Rule 8: else others are sent to it until its time to live is over."""
    with contextlib.closing(Cluster(tmp_path, segment=0, flags=["--client_ttl=60"])) as cluster:
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, f"{cluster.url}&topology=embedded&segment=16MB"]
            + (["wait"] if end == "SIGTERM" else ["exit"]),
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        assert lender.stdout.readline() == b"lends\n"
        if end == "SIGTERM":
            assert "127.0.0.1" in segments_of(cluster)
            lender.terminate()
        status = lender.wait(15)
        lender.stdout.close()
        assert status == (-signal.SIGTERM if end == "SIGTERM" else 0), "it ends as before"
        assert "127.0.0.1" not in segments_of(cluster)


def segments_of(cluster) -> str:
    url = f"http://127.0.0.1:{cluster.metrics_port}/get_all_segments"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def test_a_forked_child_of_a_real_client_is_refused_and_ends(store):
    """Rule 8; with `os._exit`, as multiprocessing ends its children."""
    assert store.match(fresh_keys(1)) == 0
    child = os.fork()
    if child == 0:
        try:
            store.close()
            store.match(fresh_keys(1))
        except StoreClosed:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.match(fresh_keys(1)) == 0


def test_what_was_put_is_leased_and_a_match_leases_it_for_as_long_as_the_url_promises(store):
    """Rule 4: else a long prompt evicts its own beginning.

    Rule 3: `lease=` must be the master's --default_kv_lease_ttl, or less.
    """
    keys = fresh_keys(1)
    put(store, keys, [b"x"])
    with master_of(store) as raw:
        assert raw.batch_remove(keys, False) == [-706]
        start = time.monotonic()
        store.match(keys)
        eventually(lambda: raw.batch_remove(keys, False) == [0], LEASE_S + 5)
    assert time.monotonic() - start > LEASE_S - 0.5
    assert store.lease_s == LEASE_S


def test_error_codes_are_counted_and_shown(cluster):
    """Rule 11."""
    store, metrics = cluster.connect(cluster.url), Metrics()
    metrics.add_codes(store.codes)
    with contextlib.closing(store):
        get(store, fresh_keys(2), [4096, 4096])
        samples = [s for f in metrics.registry.collect() for s in f.samples]
        shown = {s.labels["code"]: s.value for s in samples if s.name.endswith("codes_total")}
    assert shown == {"not stored (-704)": 2}


def test_the_doctor_tries_a_real_pool(cluster, capsys):
    """Rule 11."""
    status, out = main(["doctor", "--store", cluster.url]), capsys.readouterr().out
    assert "save, find, load, compare and remove are right" in out
    assert status == 1
    assert "less than one prompt" in out  # the tests' pool is small


def test_a_clear_is_one_search_from_a_keys_start_by_force(store, peer):
    """Rule 12; what is half-written stays, and its writer may finish it."""
    [key, half, other] = fresh_keys(3)
    namespace = key.split(":")[1]
    named = BlockKey(f"{fresh_keys(1)[0]}:{namespace}")
    put(store, [key, named], [b"x", b"x"])
    half_write(peer, [half], SIZE)
    assert put(store, [half], [b"x" * SIZE]) == 0
    store.clear(namespace)
    assert [peer.match([k]) for k in (key, half, named)] == [0, 0, 1]
    assert size_of(store, half) == HALF_WRITTEN
    assert put(store, [key, other], [b"y", b"y"]) == 2
    eventually(lambda: put(store, [half], [b"y" * SIZE]) == 1, DISCARD_S + 5)
