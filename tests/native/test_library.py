"""library: loading, and what PDSTORE_NATIVE makes of a library that is missing."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest

from pdstore.errors import ConfigError, NativeError
from pdstore.native.library import Library, LibraryLoader, address_of
from tests.support import native_kit
from tests.support.kv import settings_of


def missing(*, with_cuda):
    raise NativeError("there is no cmake")


def test_a_library_that_cannot_be_had_is_looked_for_once_and_its_reason_is_kept(caplog):
    """Each look may be a build that fails, and a store asks at every call."""
    looks = []

    def find(*, with_cuda):
        looks.append(with_cuda)
        raise NativeError("no compiler")

    loader = LibraryLoader(find)
    assert loader.load(settings_of(native="off"), for_gpu=False) is None
    assert looks == []
    assert [loader.load(settings_of(), for_gpu=False) for _ in range(3)] == [None] * 3
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == "block copies go through torch: no compiler"
    with pytest.raises(ConfigError, match="PDSTORE_NATIVE=require: no compiler"):
        loader.load(settings_of(native="require"), for_gpu=False)
    assert looks == [False]


@pytest.mark.parametrize("is_built", [True, False])
def test_who_must_not_wait_gets_what_is_built_and_looks_for_it_once(is_built):
    path, looks = native_kit.open_library().path, []

    def find_built():
        looks.append(1)
        return path if is_built else None

    loader = LibraryLoader(missing, find_built)
    found = [loader.built(settings_of()) for _ in range(2)]
    assert looks == [1]
    assert found[0] is found[1]
    assert (found[0] is not None) is is_built
    assert loader.built(settings_of(native="off")) is None


@pytest.mark.skipif(native_kit.HAS_GPU, reason="there is a GPU")
def test_a_library_that_finds_no_gpu_does_not_serve_one():
    loader = LibraryLoader(lambda *, with_cuda: native_kit.open_library().path)
    with pytest.raises(ConfigError, match=r"finds no GPU|was built without CUDA"):
        loader.load(settings_of(native="require"), for_gpu=True)


def test_a_file_that_is_no_library_is_an_error(tmp_path):
    path = tmp_path / "libpdstore.so"
    path.write_text("no")
    with pytest.raises(NativeError, match="cannot load"):
        Library(path)


def test_a_library_of_another_abi_is_refused_before_it_is_asked_for_more(tmp_path):
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text('extern "C" int pds_info(int *info) { info[0] = 2; return 0; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(NativeError, match="has ABI 2"):
        Library(library)


def test_making_memory_present_undoes_nothing_that_others_write_meanwhile(library):
    """Two processes map an arena; on kernels before 5.14, and here at odd addresses, by a touch."""
    page, count = 4096, 8192
    memory = bytearray(page * (count + 1))
    touched = slice(1, 1 + page * count, page)
    is_over = threading.Event()

    def touch():
        while not is_over.is_set():
            library.populate(address_of(memoryview(memory)) + 1, page * count)

    toucher = threading.Thread(target=touch)
    toucher.start()
    end = time.monotonic() + 0.5
    try:
        for number in range(1_000_000):
            written = bytes([number % 256]) * count
            memory[touched] = written
            assert memory[touched] == written
            if time.monotonic() > end:
                break
    finally:
        is_over.set()
        toucher.join()
