"""What MooncakeStore makes of each result code, and how it treats the library: with a double of it.

The rules are those of deploy/mooncake.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import pdstore.store.mooncake.store as module
from pdstore.errors import (
    MissingExtra,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.circuit_breaker import CircuitBreaker
from pdstore.store.mooncake import library as mooncake_library
from pdstore.store.mooncake.client import Client
from pdstore.testing import fresh_keys
from pdstore.testing.threads import run_together, start_background
from pdstore.testing.values import content, empty_slots, filled_slots, get, put
from tests.support.kv import eventually

SIZE = 256


class Raw:
    """Answers like the library: from a dict, or with the codes of a script."""

    def __init__(self):
        self.values, self.sizes, self.script, self.calls = {}, {}, [], []
        self.buffers, self.is_closed = [], False
        self.gate = threading.Event()
        self.gate.set()

    def _answer(self, verb, keys, usual):
        assert not self.is_closed, "the library would crash"
        self.calls.append((verb, list(keys)))
        self.gate.wait(30)
        if self.script and self.script[0][0] == verb:
            codes = self.script.pop(0)[1]
            return [code if code else usual(i) for i, code in enumerate(codes)]
        return [usual(i) for i in range(len(keys))]

    def batch_put_from(self, keys, addresses, sizes, config):
        def usual(i):
            self.values.setdefault(keys[i], sizes[i])
            return 0

        return self._answer("put", keys, usual)

    def batch_get_into(self, keys, addresses, sizes):
        return self._answer("get", keys, lambda i: self.values.get(keys[i], -704))

    def batch_is_exist(self, keys):
        return self._answer("exist", keys, lambda i: int(keys[i] in self.values))

    def batch_remove(self, keys, force):
        assert force
        return self._answer("remove", keys, lambda i: 0 if self.values.pop(keys[i], 0) else -704)

    def remove_by_regex(self, pattern, force):
        assert force
        [code] = self._answer("clear", [pattern], lambda _: 1)
        return code

    def get_size(self, key):
        return self.sizes.get(key, self.values.get(key, -704))

    def register_buffer(self, address, size):
        self.buffers.append((address, size))
        return 0

    def unregister_buffer(self, address):
        self.buffers = [b for b in self.buffers if b[0] != address]
        return 0

    def close(self):
        self.is_closed = True
        return 0

    def count(self, verb):
        return sum(call[0] == verb for call in self.calls)


class Library:
    raw: Raw
    configs: list

    def __init__(self, config):
        self.configs.append(config)

    def connect_data(self):
        return self.raw

    connect_lookup = connect_data

    def allocator(self):
        return None

    def put_config(self, *, is_pinned):
        return is_pinned


@pytest.fixture
def raw(monkeypatch):
    raw = Library.raw = Raw()
    Library.configs = []
    monkeypatch.setattr(module, "Library", Library)
    monkeypatch.setattr(Client, "_probe", lambda self: None)
    return raw


@pytest.fixture
def store(raw):
    with contextlib.closing(open_store("mooncake://m:1", Settings())) as store:
        yield store
        raw.gate.set()


@pytest.mark.parametrize("code", [-700, -703, -704, -707, -800])
def test_what_cannot_be_read_now_is_a_miss(store, raw, code):
    """Rule 5."""
    keys = fresh_keys(3)
    put(store, keys, [b"x" * SIZE] * 3)
    raw.script = [("get", [0, code, 0])]
    if code == -707:
        raw.script += [("get", [0]), ("get", [code, 0])]
    assert get(store, keys, [SIZE] * 3) == [b"\xee" * SIZE]


@pytest.mark.parametrize(
    ("code", "error"),
    [(-900, StoreUnavailable), (-901, StoreTimeout), (-1, StoreUnavailable), (-601, StoreError)],
)
@pytest.mark.parametrize("verb", ["exist", "get", "put", "remove"])
def test_an_outage_is_an_error_that_counts_what_was_done(store, raw, verb, code, error):
    """Rule 5: not a miss, so that the breaker hears of it."""
    keys = fresh_keys(3)
    raw.values = dict.fromkeys(keys, SIZE)
    raw.script = [(verb, [0, code, 0])]
    call = {
        "exist": lambda: store.match(keys),
        "get": lambda: get(store, keys, [SIZE] * 3),
        "put": lambda: put(store, keys, [b"x" * SIZE] * 3),
        "remove": lambda: store.remove(keys),
    }[verb]
    if verb == "put" and code == -601:
        assert call() == 3, "the keys are there, whatever the put said"
        return
    with pytest.raises(error, match=str(code)) as caught:
        call()
    assert caught.value.num_done == (0 if verb == "remove" else 1)


@pytest.mark.parametrize(
    ("code", "error"), [(-900, StoreUnavailable), (-901, StoreTimeout), (-600, StoreError)]
)
def test_a_clear_is_one_call_and_its_code_is_an_error(store, raw, code, error):
    """Rule 12."""
    namespace = "0123456789abcdef" * 2
    store.clear(namespace)
    assert raw.calls == [("clear", [f"^pds1:{namespace}:"])]
    raw.script = [("clear", [code])]
    with pytest.raises(error, match=rf"clear of pds1:{namespace}:.*\({code}\)"):
        store.clear(namespace)
    assert sum(store.codes().values()) == 1


def test_a_read_that_outlived_its_lease_is_tried_once_more_in_halves(store, raw):
    """Rule 5: -707 fails the whole batch."""
    keys = fresh_keys(8)
    raw.values = dict.fromkeys(keys, SIZE)
    raw.script = [("get", [-707] * 8)]
    assert len(get(store, keys, [SIZE] * 8)) == 8
    assert [call[1] for call in raw.calls] == [keys, keys[:4], keys[4:]]
    raw.calls.clear()
    raw.script = [("get", [-707] * 8), ("get", [0] * 4), ("get", [0, -707, 0, 0])]
    assert len(get(store, keys, [SIZE] * 8)) == 5
    assert raw.count("get") == 3


@pytest.mark.parametrize(
    ("answer", "stored"), [(SIZE - 1, SIZE - 1), (SIZE + 1, SIZE + 1), (-600, SIZE + 1)]
)
def test_a_length_that_is_not_expected_is_wrong_length(store, raw, answer, stored):
    """Rule 5."""
    keys = fresh_keys(2)
    raw.values = {keys[0]: SIZE, keys[1]: stored}
    raw.script = [("get", [0, answer])]
    with pytest.raises(WrongLength) as caught:
        get(store, keys, [SIZE] * 2)
    assert caught.value.num_done == 1


def test_a_refused_call_is_not_taken_for_a_wrong_length(store, raw):
    keys = fresh_keys(1)
    raw.values = {keys[0]: SIZE}
    raw.script = [("get", [-600])]
    with pytest.raises(StoreError, match="invalid arguments") as caught:
        get(store, keys, [SIZE])
    assert not isinstance(caught.value, WrongLength)


def test_no_room_is_tried_again_after_growing_pauses_and_then_store_full(store, raw):
    """Rule 4: after 10, 30 and 90 ms; only the keys that found no room."""
    keys = fresh_keys(3)
    raw.script = [("put", [0, -200, 0]), ("put", [-200]), ("put", [-200])]
    start = time.monotonic()
    assert put(store, keys, [b"x" * SIZE] * 3) == 3
    assert time.monotonic() - start >= 0.13
    assert [call[1] for call in raw.calls if call[0] == "put"] == [keys, *[[keys[1]]] * 3]
    raw.calls.clear()
    keys = fresh_keys(3)
    raw.script = [("put", [0, -200, 0])] + [("put", [-200])] * 3
    with pytest.raises(StoreFull) as caught:
        put(store, keys, [b"x" * SIZE] * 3)
    assert caught.value.num_done == 1


def test_while_the_pool_is_full_a_put_is_tried_once_and_does_not_wait(store, raw):
    """Rule 4: pressure. A put that fails is what makes the master evict, so it is not left out."""
    raw.script = [("put", [-200])] * 4
    with pytest.raises(StoreFull):
        put(store, fresh_keys(1), [b"x"])
    start, raw.calls = time.monotonic(), []
    for _ in range(5):
        raw.script = [("put", [-200])]
        with pytest.raises(StoreFull):
            put(store, fresh_keys(1), [b"x"])
    assert time.monotonic() - start < 0.1
    assert raw.count("put") == 5
    assert put(store, fresh_keys(1), [b"x"]) == 1


def test_a_failed_transfer_is_put_once_more_and_then_unavailable(store, raw):
    """Rule 4."""
    keys = fresh_keys(2)
    raw.script = [("put", [0, -800])]
    assert put(store, keys, [b"x"] * 2) == 2
    assert raw.count("put") == 2
    raw.calls.clear()
    raw.script = [("put", [-800]), ("put", [-800])]
    with pytest.raises(StoreUnavailable, match="holds the memory"):
        put(store, fresh_keys(1), [b"x"])
    assert raw.count("put") == 2


def test_a_put_that_timed_out_is_not_repeated_before_the_master_frees_its_key(raw):
    """Rule 4: the master may execute it later, and then the key is taken and empty."""
    store = open_store("mooncake://m:1?discard=0.3", Settings())
    keys = fresh_keys(2)
    raw.script = [("put", [0, -901])]
    with pytest.raises(StoreTimeout):
        put(store, keys, [b"x"] * 2)
    raw.values.pop(keys[1], None)
    raw.calls.clear()
    assert put(store, keys, [b"x"] * 2) == 1
    assert [call[1] for call in raw.calls if call[0] == "put"] == [[keys[0]]]
    eventually(lambda: put(store, keys, [b"x"] * 2) == 2)
    store.close()


def test_a_put_of_a_half_written_key_is_no_success(store, raw, monkeypatch):
    """Rule 4: the code of the put is a hint; what counts is that the key can be seen."""
    monkeypatch.setattr("pdstore.store.mooncake.put.WRITER_S", 0.05)
    keys = fresh_keys(3)
    raw.sizes[keys[1]] = -703
    hide(raw, keys[1])
    assert put(store, keys, [b"x"] * 3) == 1
    raw.sizes.clear()
    raw.values[keys[1]] = 1
    raw.__dict__.pop("batch_is_exist")
    assert put(store, keys, [b"x"] * 3) == 3, "its writer came to an end after all"


def test_a_value_that_is_evicted_before_it_is_leased_is_put_again(store, raw):
    """Rule 4."""
    keys = fresh_keys(1)
    raw.script = [("put", [0])]
    evicted = []

    def evict_once(asked):
        if not evicted:
            evicted.append(raw.values.pop(keys[0]))
        return [int(key in raw.values) for key in asked]

    raw.batch_is_exist = evict_once
    assert put(store, keys, [b"x"]) == 1
    assert raw.count("put") == 2


def hide(raw, key):
    def exist(asked):
        return [int(each in raw.values and each != key) for each in asked]

    raw.batch_is_exist = exist


def test_a_quota_and_a_missing_tenant_are_named(store, raw):
    raw.script = [("put", [-1700])]
    hide(raw, keys0 := fresh_keys(1)[0])
    with pytest.raises(StoreFull, match="quota"):
        put(store, [keys0], [b"x"])
    raw.script = [("put", [-1701])]
    with pytest.raises(StoreDenied, match="tenant"):
        put(store, [keys0], [b"x"])


def test_a_match_asks_in_growing_windows_and_stops_at_the_first_gap(store, raw):
    """Rule 6: what is asked is leased."""
    keys = fresh_keys(2000)
    raw.values = dict.fromkeys(keys[:40], 1)
    assert store.match(keys) == 40
    assert [len(call[1]) for call in raw.calls] == [32, 128]
    raw.calls.clear()
    raw.values = dict.fromkeys(keys, 1)
    assert store.match(keys) == 2000
    assert [len(call[1]) for call in raw.calls] == [32, 128, 512, 512, 512, 304]


def test_a_batch_is_no_larger_than_what_the_lease_allows(raw):
    """Rule 3: a third of the lease, at the rate seen lately (1 GB/s before any was)."""
    with contextlib.closing(open_store("mooncake://m:1?lease=0.03", Settings())) as store:
        keys, size = fresh_keys(20), 1 << 20
        raw.values = dict.fromkeys(keys, size)
        slots = Slots(memoryview(bytearray(size)), size, [0] * 20, [size] * 20)
        assert store.get(keys, slots) == 20
        assert [len(call[1]) for call in raw.calls] == [9, 9, 2]


def test_small_values_go_in_large_batches_and_large_ones_16_at_a_time(store, raw):
    """Rule 3."""
    keys = fresh_keys(2000)
    raw.values = dict.fromkeys(keys, SIZE)
    get(store, keys, [SIZE] * 2000)
    assert [len(call[1]) for call in raw.calls] == [2000]
    raw.calls.clear()
    size = 4 << 20
    raw.values = dict.fromkeys(keys, size)
    slots = Slots(memoryview(bytearray(size)), size, [0] * 40, [size] * 40)
    assert store.get(keys[:40], slots) == 40
    assert [len(call[1]) for call in raw.calls] == [16, 16, 8]


def test_after_a_short_batch_nothing_more_is_read(store, raw):
    size, keys = 4 << 20, fresh_keys(40)
    raw.values = dict.fromkeys(keys[:5], size)
    slots = Slots(memoryview(bytearray(size)), size, [0] * 40, [size] * 40)
    assert store.get(keys, slots) == 5
    assert raw.count("get") == 1


def test_staging_is_registered_once_whenever_it_was_allocated(store, raw):
    """Rule 2."""
    views = [store.allocate(1 << 20)]
    assert raw.buffers == []
    for _ in range(2):
        put(store, fresh_keys(1), [b"x"])
        assert [size for _, size in raw.buffers] == [1 << 20]
    views.append(store.allocate(2 << 20))
    assert [size for _, size in raw.buffers] == [1 << 20, 2 << 20]
    del views[0]
    store.allocate(4096)
    assert [size for _, size in raw.buffers] == [2 << 20]


def test_memory_that_the_transport_cannot_move_goes_through_a_slab_that_it_can(raw):
    """Rule 2: RDMA moves registered memory only."""
    seen = []
    usual = raw.batch_put_from

    def watched(keys, addresses, sizes, config):
        seen.extend(zip(addresses, sizes, strict=True))
        return usual(keys, addresses, sizes, config)

    raw.batch_put_from = watched
    with contextlib.closing(open_store("mooncake://m:1?protocol=rdma", Settings())) as store:
        put(store, fresh_keys(3), [b"x" * SIZE] * 3)
        slots = Slots(store.allocate(1 << 20), SIZE, [1, 0], [SIZE] * 2)
        store.put(fresh_keys(2), slots)
        for address, size in seen:
            assert any(b <= address and address + size <= b + n for b, n in raw.buffers)


def test_the_pools_own_key_is_pinned_and_in_a_batch_of_its_own(store, raw):
    pinned = {}
    usual = raw.batch_put_from

    def watched(keys, addresses, sizes, config):
        pinned.update(dict.fromkeys(keys, config))
        return usual(keys, addresses, sizes, config)

    raw.batch_put_from = watched
    keys = fresh_keys(2)
    put(store, [keys[0], module.POOL_ID_KEY, keys[1]], [b"x"] * 3)
    assert pinned == {keys[0]: False, module.POOL_ID_KEY: True, keys[1]: False}


@contextlib.contextmanager
def listening(*, answers: bool) -> Iterator[int]:
    """A port that accepts connections; and hangs up on them, or does nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if not answers:
            yield server.getsockname()[1]
            return
        server.settimeout(0.05)
        is_over = threading.Event()

        def hang_up():
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        join = start_background(hang_up)
        yield server.getsockname()[1]
        is_over.set()
        join(5)


def test_the_library_is_not_set_up_before_the_master_answers(raw, monkeypatch):
    """Rule 7: setup would stop the whole process."""
    monkeypatch.undo()
    made = []
    with listening(answers=False) as port:
        client = Client("x", ("127.0.0.1", port), lambda: made.append(1) or raw)
        start = time.monotonic()
        with pytest.raises(StoreTimeout), client.call():
            pass
        assert 0.4 < time.monotonic() - start < 2
    with pytest.raises(StoreUnavailable, match="is not there"), client.call():
        pass
    assert not made
    with listening(answers=True) as port:
        client = Client("x", ("127.0.0.1", port), lambda: made.append(1) or raw)
        for _ in range(3):
            with client.call():
                pass
    assert made == [1]
    client.close()


def test_after_an_outage_the_master_is_asked_before_the_library_is_called(store, raw, monkeypatch):
    """Rule 7: a call of the library would take 4.5 s."""
    store.match(fresh_keys(1))
    raw.script = [("exist", [-900])]
    with pytest.raises(StoreUnavailable):
        store.match(fresh_keys(1))
    raw.calls.clear()

    def refuse(self):
        raise StoreUnavailable("away")

    monkeypatch.setattr(Client, "_probe", refuse)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="away"):
            store.match(fresh_keys(1))
    assert raw.calls == []
    monkeypatch.setattr(Client, "_probe", lambda self: None)
    assert store.match(fresh_keys(1)) == 0


def test_the_breaker_lets_nothing_through_while_it_is_open(store, raw):
    """Rule 7."""
    guarded = CircuitBreaker(store, failures=3, open_s=60)
    raw.script = [("exist", [-901])] * 3
    for _ in range(3):
        with pytest.raises(StoreTimeout):
            guarded.match(fresh_keys(1))
    raw.calls.clear()
    with pytest.raises(StoreUnavailable, match="in a row"):
        guarded.match(fresh_keys(1))
    assert raw.calls == []


def test_a_setup_that_fails_is_unavailable_and_tried_again(raw, monkeypatch):
    answers = [-1, raw]
    client = Client("x", None, lambda: answers.pop(0))
    with pytest.raises(StoreUnavailable, match="setup failed"), client.call():
        pass
    with client.call() as got:
        assert got is raw
    client.close()


def test_close_waits_for_the_calls_that_run(store, raw):
    """Rule 8: a close during a call crashes the library."""
    store.match(fresh_keys(1))
    raw.gate.clear()
    join = start_background(lambda: store.match(fresh_keys(1)), lambda: eventually_open(raw))
    eventually(lambda: raw.count("exist") == 2)
    run_together(store.close)
    join(10)
    assert raw.is_closed
    with pytest.raises(StoreClosed):
        store.match(fresh_keys(1))


def eventually_open(raw):
    eventually(lambda: raw.count("exist") == 2)
    time.sleep(0.05)
    assert not raw.is_closed
    raw.gate.set()


def test_a_call_that_never_ends_does_not_hold_up_close(raw):
    """Rule 8: the object is left alone then, not destroyed."""
    client = Client("x", None, lambda: raw)
    with client.call():
        client.close(drain_s=0.05)
        assert not raw.is_closed
    with pytest.raises(StoreClosed), client.call():
        pass


def test_a_forked_child_neither_calls_nor_closes_the_parents_object(store, raw):
    """Rule 8."""
    store.match(fresh_keys(1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.match(fresh_keys(1))
        except StoreClosed:
            store.close()
            os.write(writer, b"refused" if not raw.is_closed and len(raw.calls) == 1 else b"no")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"refused"
    os.close(reader)
    os.close(writer)


def test_the_librarys_settings_are_made_before_it_is_imported_and_the_users_kept():
    """Rule 7: its own defaults wait 30 s and more."""
    code = (
        "import os, sys\n"
        "from pdstore.store import mooncake_library as library\n"
        "from pdstore.store.mooncake.config import MooncakeConfig\n"
        "def load():\n"
        "    print({n: v for n, v in os.environ.items() if n.startswith('MC_')})\n"
        "library._load = load\n"
        "library.Library(MooncakeConfig(master='127.0.0.1:1'))\n"
    )
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MC_")}
    environment["MC_RPC_TIMEOUT_MS"] = "123"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    expected = {**mooncake_library.VARIABLES, "MC_RPC_TIMEOUT_MS": "123"}
    assert eval(done.stdout) == {**expected, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'pdstore\[mooncake\]'"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "apt-get install libibverbs1",
        ),
        (ImportError("libcudart.so.12: cannot open"), r"pdstore\[mooncake-cpu\]"),
    ],
)
def test_what_is_not_installed_is_said_with_the_command(monkeypatch, error, words):
    usual = importlib.import_module

    def fail(name):
        if name == "mooncake.store":
            raise error
        return usual(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingExtra, match=words):
        open_store("mooncake://127.0.0.1:1", Settings())


def test_content_is_moved_to_the_slots_it_belongs_to(store, raw):
    keys = fresh_keys(2)
    store.put(keys, filled_slots([content(key, SIZE) for key in keys]))
    assert store.get(keys, empty_slots([SIZE] * 2)) == 2
