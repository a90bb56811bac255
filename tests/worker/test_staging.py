"""Staging: slots, windows, and files that are read and verified in single calls."""

from __future__ import annotations

import mmap
import threading
from functools import partial

import pytest

from pdstore import JobResult, Reason
from pdstore.errors import ConfigError, Direction
from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import Kind, kind_of
from pdstore.native.library import load_library
from pdstore.store.file.store import FileStore
from pdstore.store.wrappers import WrapperStore
from pdstore.threads import Deadline
from pdstore.worker.swap.base import TorchSwap
from pdstore.worker.transfer.staging import Staging
from tests.support.kv import BLOCK_BYTES, POISON, settings_of
from tests.support.pool_kit import D_BLOCKS, assert_loaded, load, save

SLOT = 4096


def staging_of(num_slots: int = 16) -> Staging:
    return Staging(lambda n: memoryview(bytearray(n)), SLOT - HEADER_BYTES, num_slots * SLOT)


def loan(staging, direction, most, least=1, seconds=0.0, is_over=lambda: False):
    return staging.loan(direction, most, least=least, deadline=Deadline(seconds), is_over=is_over)


@pytest.mark.misconfiguration("staging of 1 KiB")
def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(ConfigError, match=r"PDSTORE_STAGING.*set it to 32MiB"):
        Staging(lambda n: memoryview(bytearray(n)), (2 << 20) - HEADER_BYTES, 8 << 20)


def test_many_borrowers_never_share_a_slot():
    staging, owners, wrong = staging_of(), {}, []
    lock = threading.Lock()

    def work(direction):
        for _ in range(200):
            with loan(staging, direction, 3, seconds=10) as numbers:
                with lock:
                    wrong.extend(n for n in numbers if n in owners)
                    owners.update(dict.fromkeys(numbers, direction))
                with lock:
                    for n in numbers:
                        del owners[n]

    threads = [threading.Thread(target=work, args=(d,)) for d in Direction for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert staging.num_lent == 0


@pytest.mark.misconfiguration("staging above the host's memory")
def test_more_memory_than_the_host_gives_is_a_setting_to_change():
    with pytest.raises(ConfigError, match=r"PDSTORE_STAGING of \d+ MiB: .* set it to less"):
        Staging(lambda n: memoryview(mmap.mmap(-1, n)), SLOT, 1 << 60)


class Watched(WrapperStore):
    """Notes how many slots are lent at each get, and how many keys it has."""

    def __init__(self, store):
        super().__init__(store)
        self.pool, self.lent, self.windows = None, [], []

    def get(self, keys, slots):
        if ":0:0:" in keys[0]:
            self.lent.append(slots_lent(self.pool))
            self.windows.append(len(keys))
        return super().get(keys, slots)


def slots_lent(pool) -> float:
    return pool.metrics.registry.get_sample_value("pdstore_slots_lent")


def test_a_child_job_holds_two_windows_at_most_and_gives_all_back(instance, store):
    watched = Watched(store)
    p = instance()
    d = instance(fill=POISON, over=watched, workers=2, range_bytes=2 * BLOCK_BYTES)
    watched.pool = d.pool
    save(p, range(320))
    assert load(d, range(320)).num_tokens == 320
    assert sum(watched.windows) == 5
    assert max(watched.windows) <= 2
    assert max(watched.lent) <= 4
    assert slots_lent(d.pool) == 0
    assert_loaded(p, d, 320)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_next_window_is_read_while_the_last_one_copies(instance, store, num_workers):
    """The first copy goes on until a second get has begun."""
    second = threading.Event()

    class Gets(WrapperStore):
        num_gets = 0

        def get(self, keys, slots):
            if ":0:0:" in keys[0]:
                self.num_gets += 1
                if self.num_gets == 2:
                    second.set()
            return super().get(keys, slots)

    p = instance()
    save(p, range(256))

    class SlowSwap(TorchSwap):
        def start_scatter(self, copies, ready=None):
            wait = super().start_scatter(copies, ready)

            def finish():
                assert second.wait(10)
                wait()

            return finish

    changes = {"workers": num_workers, "range_bytes": BLOCK_BYTES, "swap": SlowSwap}
    d = instance(fill=POISON, over=Gets(store), **changes)
    assert load(d, range(256)).num_tokens == 256
    assert_loaded(p, d, 256)


class Spied(FileStore):
    """Files that note which calls read and write them."""

    def __init__(self, root, library):
        super().__init__(root, built=library)
        self.calls: list[str] = []

    def get_right(self, keys, slots, starts, engine):
        self.calls.append("get_right")
        return super().get_right(keys, slots, starts, engine)

    def put_sealed(self, keys, slots, starts, engine):
        self.calls.append("put_sealed")
        return super().put_sealed(keys, slots, starts, engine)

    def get(self, keys, slots):
        self.calls += ["get"] * any(kind_of(key) in (Kind.BLOCK, Kind.TAIL) for key in keys)
        return super().get(keys, slots)

    def put(self, keys, slots):
        self.calls += ["put"] * any(kind_of(key) in (Kind.BLOCK, Kind.TAIL) for key in keys)
        return super().put(keys, slots)


@pytest.fixture
def store(tmp_path, library, closed_after):
    built = partial(load_library, settings_of(), for_gpu=False)
    return closed_after(Spied(tmp_path / "pool", built))


@pytest.fixture
def pair(instance):
    shape = {"layer_ranges": 2, "range_bytes": 2 * BLOCK_BYTES, "workers": 2}
    return [instance(fill=fill, **shape) for fill in (None, POISON)]


@pytest.mark.parametrize("num_tokens", [64, 200, 320])
def test_all_values_are_read_and_verified_in_single_calls(pair, store, num_tokens):
    p, d = pair
    assert save(p, range(num_tokens)) == JobResult(num_tokens)
    assert load(d, range(num_tokens)) == JobResult(num_tokens)
    assert_loaded(p, d, num_tokens)
    assert set(store.calls) == {"put_sealed", "get_right"}


@pytest.mark.parametrize(("harm", "reason"), [("damage", Reason.CORRUPT), ("remove", Reason.LOST)])
def test_a_value_that_is_not_right_ends_the_load_there_with_its_reason(
    instance, store, tmp_path, harm, reason
):
    p, d = (instance(fill=fill) for fill in (None, POISON))
    save(p, range(320))
    found = d.cache.match(d.cache.keys(range(320)))
    third = p.cache.keys(range(320)).store_keys(p.layout.parts)[2]
    [path] = (tmp_path / "pool").glob(f"*/{third}")
    if harm == "remove":
        path.unlink()
    else:
        value = path.read_bytes()
        path.write_bytes(value[:-1] + bytes([value[-1] ^ 1]))
    result = d.pool.load(found.keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, reason)
    assert_loaded(p, d, 128)
    assert not path.exists()
