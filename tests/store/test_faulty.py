"""Faulty by its URL: it wraps any store, fails by its rates, and repeats itself by its seed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from pdstore.errors import ConfigError, MissingExtra, StoreUnavailable
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put

QUIET = "error_rate=0&miss_rate=0&corrupt_rate=0"


def opened(url: str) -> contextlib.closing:
    return contextlib.closing(open_store(url, Settings()))


def test_a_url_wraps_the_store_of_its_rest(tmp_path):
    keys = fresh_keys(3)
    values = [content(key, 100) for key in keys]
    with opened(f"faulty+file://{tmp_path}/pool?{QUIET}&budget=1MiB") as store:
        assert store.label == f"faulty+file://{tmp_path}/pool"
        assert put(store, keys, values) == 3
    with opened(f"file://{tmp_path}/pool") as plain:
        assert get(plain, keys, [100] * 3) == values


def outcomes_of(seed: int) -> list[object]:
    keys = fresh_keys(1)
    found: list[object] = []
    url = f"faulty+memory://?seed={seed}&error_rate=0.3&miss_rate=0&corrupt_rate=0.3"
    with opened(url) as store:
        for _ in range(60):
            found.append("error")
            with contextlib.suppress(StoreUnavailable):
                put(store, keys, [b"x" * 64])
                found[-1] = get(store, keys, [64]) == [b"x" * 64]
    return found


def test_a_seed_repeats_its_faults():
    first = outcomes_of(7)
    assert {"error", True, False} <= set(first)
    assert first == outcomes_of(7)
    assert first != outcomes_of(8)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("faulty+memory://?seed=x", "seed='x' is not a whole number"),
        ("faulty+memory://?error_rate=often", "error_rate='often' is not a number"),
        ("faulty+memory://?miss_rate=1.5", "miss_rate='1.5' is not a number from 0 to 1"),
        ("faulty+memory://?hold=now", "hold='now' is no absolute path"),
        ("faulty+memory://?rate=1", r"memory://: unknown option 'rate'"),
        ("faulty+nothing://", r"bad store URL 'nothing://': it must start with one of memory://"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url, words):
    with pytest.raises(ConfigError, match=words):
        open_store(url, Settings())


def test_reads_are_as_slow_as_the_url_says():
    slow = "bytes_per_s=1MB&error_rate=0&miss_rate=0&corrupt_rate=0"
    with contextlib.closing(open_store(f"faulty+memory://?{slow}", Settings())) as store:
        keys = fresh_keys(2)
        put(store, keys, [content(key, 50_000) for key in keys])
        start = time.monotonic()
        assert len(get(store, keys, [50_000] * 2)) == 2
        assert time.monotonic() - start >= 0.1


def test_without_pytest_it_names_the_install_command(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pdstore.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[test\]'"):
        open_store("faulty+memory://", Settings())


def test_another_process_makes_its_calls_hang_by_a_file(tmp_path):
    file, keys, found = tmp_path / "hold", fresh_keys(1), []
    with opened(f"faulty+memory://?{QUIET}&hold={file}") as store:
        put(store, keys, [b"x" * 64])
        assert store.codes() == {}
        file.touch()
        call = threading.Thread(target=lambda: found.append(store.match(keys)))
        call.start()
        call.join(0.1)
        assert call.is_alive()
        file.unlink()
        call.join(10)
        assert found == [1]
        assert store.codes() == {"faulty_hold": 1}
