"""The library: its ABI, its build and how it is found."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
import time

import pytest

from pdstore.errors import ConfigError, DeviceError, LayoutError, NativeError, SwapError
from pdstore.native import library as abi
from pdstore.native.build import build_library, find_built
from pdstore.native.library import Library, LibraryLoader, address_of
from tests.support import native_kit
from tests.support.kv import settings_of

HEADER, FAULTS = native_kit.SOURCES / "pdstore.h", native_kit.SOURCES / "tests" / "faults.h"
WIDTHS = {"int32_t": 4, "int64_t": 8, "uint64_t": 8}

STRUCTS = {
    "pds_region": abi.Region,
    "pds_part": abi.PartShape,
    "pds_options": abi.Options,
    "pds_item": abi.Item,
    "pds_error": abi.Error,
    "pds_plan": abi.Plan,
    "pds_arena_options": abi.ArenaOptions,
    "pds_arena_info": abi.ArenaInfo,
    "pds_arena_counts": abi.SlotCounts,
    "pds_arena_value": abi.ArenaValue,
    "pds_live": native_kit.Live,
    "pds_values": abi.Values,
    "pds_info_t": abi.Info,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name):
    text = re.sub(r"//.*", "", HEADER.read_text() + FAULTS.read_text())
    text = re.sub(r"const \w+ \*", "uint64_t *", text)  # an address, as wide
    [body] = re.findall(rf"typedef struct \{{([^}}]*)\}} {name};", text)
    expected = []
    for line in filter(str.strip, body.split(";")):
        kind, names = line.split(None, 1)
        for field in names.split(","):
            array = re.fullmatch(r"(\w+)\[(\d+)\]", field.strip())
            one = (field.strip(" *\n"), WIDTHS.get(kind, 1))
            expected.append((array[1], int(array[2])) if array else one)
    fields = STRUCTS[name]._fields_
    assert [(field, ctypes.sizeof(kind)) for field, kind in fields] == expected


def test_the_calls_that_can_fail_are_those_of_the_header():
    names = re.findall(r"PDS_CALL_(\w+)", FAULTS.read_text())
    assert tuple(name.lower() for name in names) == native_kit.CALLS


def test_the_abi_number_is_that_of_the_header():
    [number] = re.findall(r"PDS_ABI = (\d+)", HEADER.read_text())
    assert int(number) == abi.ABI


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (abi.Code.ARGUMENT, LayoutError),
        (abi.Code.NO_DEVICE, DeviceError),
        (abi.Code.DEVICE, SwapError),
        (abi.Code.POISONED, SwapError),
        (abi.Code.CLOSED, SwapError),
    ],
)
def test_a_code_is_raised_as_its_exception_with_the_message(code, error):
    with pytest.raises(error, match="the reason"):
        abi.raise_error(abi.Error(code=code, message=b"the reason"))


def test_a_device_error_names_the_call_and_the_slice_and_ok_is_none():
    abi.raise_error(abi.Error(code=abi.Code.OK))
    error = abi.Error(code=abi.Code.DEVICE, device_code=719, slice=3, call=b"cudaMemcpy")
    with pytest.raises(SwapError, match="error 719 of cudaMemcpy, slice 3") as caught:
        abi.raise_error(error)
    assert (caught.value.device_code, caught.value.slice_number) == (719, 3)


def sources_in(folder, text="file(WRITE ${CMAKE_BINARY_DIR}/libpdstore.so built)", name="x"):
    """Makes a folder of sources whose build does what CMake is told."""
    folder.mkdir(exist_ok=True)
    head = f"cmake_minimum_required(VERSION 3.22)\nproject({name} NONE)\n"
    (folder / "CMakeLists.txt").write_text(f"{head}{text}\n")
    return folder


def test_the_compilers_output_is_in_the_error(tmp_path):
    sources = sources_in(tmp_path / "csrc", "message(FATAL_ERROR this is wrong)")
    with pytest.raises(NativeError, match=r"this\s*is\s*wrong"):
        build_library(sources, directory=tmp_path / "cache")


def test_concurrent_callers_wait_for_one_build(tmp_path):
    count, built = tmp_path / "count", []
    sources = sources_in(
        tmp_path / "csrc",
        f'file(APPEND {count} "x")\nfile(WRITE ${{CMAKE_BINARY_DIR}}/libpdstore.so built)',
    )
    threads = [
        threading.Thread(target=lambda: built.append(build_library(sources, directory=tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(built)) == 1
    assert built[0].read_text() == "built"
    assert count.read_text() == "x"


def test_only_what_is_built_is_found_without_a_build_and_what_is_packaged_first(tmp_path):
    sources, package, cache = (tmp_path / name for name in ("csrc", "package", "cache"))
    assert find_built(package, sources, cache) is None
    sources_in(sources)
    assert find_built(package, sources, cache) is None
    built = build_library(sources, directory=cache)
    assert find_built(package, sources, cache) == built
    assert build_library(sources_in(sources, name="changed"), directory=cache) != built
    package.mkdir()
    (package / "libpdstore.so").write_text("packaged")
    assert find_built(package, sources, cache) == package / "libpdstore.so"


def test_a_cache_that_cannot_be_written_is_an_error_of_the_library(tmp_path):
    cache = tmp_path / "cache"
    cache.write_text("a file, in which even root makes no directory")
    with pytest.raises(NativeError, match=f"cannot be kept in {cache}"):
        build_library(sources_in(tmp_path / "csrc"), directory=cache)


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


@pytest.mark.skipif(native_kit.HAS_GPU, reason="there is a GPU")
def test_a_library_that_finds_no_gpu_does_not_serve_one():
    loader = LibraryLoader(lambda *, with_cuda: native_kit.open_library().path)
    with pytest.raises(ConfigError, match=r"finds no GPU|was built without CUDA"):
        loader.load(settings_of(native="require"), for_gpu=True)


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
