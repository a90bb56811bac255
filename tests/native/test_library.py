"""Finding, building and loading the native library."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdstore.errors import ConfigError, DeviceError, NativeError
from pdstore.format.layer_spec import LayerSpec
from pdstore.format.layout import Layout
from pdstore.native import abi as native_abi
from pdstore.native import library as native
from pdstore.native.build import build_library
from pdstore.worker.swap import open_swap
from pdstore.worker.swap.native import NativeSwap
from pdstore.worker.swap.torch import TorchSwap
from tests.support import native_kit
from tests.support.kv import caches_of, settings_of
from tests.worker.swap.test_torch import layout_of

HEADER = native_kit.SOURCES / "pdstore.h"


def test_off_means_torch():
    layout = layout_of()
    swap = open_swap(settings_of(native="off"), layout, caches_of(layout))
    assert isinstance(swap, TorchSwap)
    assert {p.path for p in swap.plan()} == {"TORCH"}


def test_auto_means_the_library_on_host_tensors_too():
    native_kit.open_library()
    layout = layout_of()
    swap = open_swap(settings_of(), layout, caches_of(layout))
    assert isinstance(swap, NativeSwap)
    swap.close()


def test_without_a_library_auto_is_torch_and_require_is_an_error(monkeypatch, caplog):
    def missing(*, with_cuda):
        raise NativeError("there is no cmake")

    native._load.cache_clear()
    native._say_once.cache_clear()
    monkeypatch.setattr(native, "find_library", missing)
    layout = layout_of()
    for _ in range(3):
        assert isinstance(open_swap(settings_of(), layout, caches_of(layout)), TorchSwap)
    assert [r.getMessage() for r in caplog.records] == [
        "block copies go through torch: there is no cmake"
    ]
    with pytest.raises(ConfigError, match="PDSTORE_NATIVE=require: there is no cmake"):
        open_swap(settings_of(native="require"), layout, caches_of(layout))


@pytest.mark.parametrize("device", [-2, 99, 2**31 - 1])
def test_a_device_that_is_not_there_fails_the_constructor(device):
    layout = Layout(
        dtype="uint8",
        rope="",
        layers=(LayerSpec(1, 4),),
        block_tokens=1,
        engine_block_tokens=1,
    )
    with pytest.raises(DeviceError, match="no CUDA device"):
        NativeSwap(
            native_kit.open_library(),
            layout,
            caches_of(layout, 2, fill=0),
            sizes={"device": device},
        )


def test_a_file_that_is_no_library_is_an_error(tmp_path):
    path = tmp_path / "libpdstore.so"
    path.write_text("no")
    with pytest.raises(NativeError, match="cannot load"):
        native.Library(path)


def test_a_compilers_words_are_in_the_error(tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "CMakeLists.txt").write_text("message(FATAL_ERROR this is wrong)")
    with pytest.raises(NativeError, match=r"this\s*is\s*wrong"):
        build_library(sources, directory=tmp_path / "cache")


def test_who_comes_while_another_builds_waits_and_uses_that_build(tmp_path):
    native_kit.open_library()
    sources = tmp_path / "csrc"
    sources.mkdir()
    count = tmp_path / "count"
    (sources / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(x NONE)\n"
        f'file(APPEND {count} "x")\n'
        "file(WRITE ${CMAKE_BINARY_DIR}/libpdstore.so built)\n"
    )
    built = []
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


def test_a_changed_source_is_another_build(tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    paths = []
    for text in ("a", "b"):
        (sources / "CMakeLists.txt").write_text(
            f"cmake_minimum_required(VERSION 3.22)\nproject({text} NONE)\n"
            "file(WRITE ${CMAKE_BINARY_DIR}/libpdstore.so built)\n"
        )
        native_kit.open_library()
        paths.append(build_library(sources, directory=tmp_path / "cache"))
    assert paths[0] != paths[1]


def test_a_library_of_another_abi_is_refused_before_it_is_asked_for_more(tmp_path):
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text('extern "C" int pds_info(int *info) { info[0] = 2; return 0; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(NativeError, match="has ABI 2"):
        native.Library(library)


@pytest.mark.parametrize(
    ("name", "struct"),
    [
        ("pds_region", native_abi.Region),
        ("pds_part", native_abi.PartShape),
        ("pds_options", native_abi.Options),
        ("pds_item", native_abi.Item),
        ("pds_error", native_abi.Error),
        ("pds_plan", native_abi.Plan),
        ("pds_stats", native_abi.Stats),
        ("pds_live", native_kit.Live),
        ("pds_info_t", native_abi.Info),
    ],
)
def test_structs_are_those_of_the_header(name, struct):
    text = re.sub(r"//.*", "", HEADER.read_text())
    body = next(
        m.group(1)
        for m in re.finditer(r"typedef struct \{(.*?)\} (\w+);", text, re.S)
        if m.group(2) == name
    )
    fields = []
    for line in filter(str.strip, body.split(";")):
        kind, names = line.split(None, 1)
        fields += [(kind, n.strip()) for n in names.split(",")]
    widths = {"int32_t": 4, "int64_t": 8, "uint64_t": 8}
    seen = []
    for field, kind in struct._fields_:
        size = native_abi.ctypes.sizeof(kind)
        seen.append((field, size))
    expected = []
    for kind, field in fields:
        array = re.fullmatch(r"(\w+)\[(\d+)\]", field)
        expected.append((array[1], int(array[2])) if array else (field, widths[kind]))
    assert seen == expected


def test_the_calls_that_can_fail_are_those_of_the_header():
    names = re.findall(r"PDS_CALL_(\w+)", HEADER.read_text())
    assert tuple(name.lower() for name in names) == native_kit.CALLS


def test_a_child_of_a_fork_is_told_that_the_engine_is_its_parents():
    native_kit.open_library()
    program = """
import os
from tests.support import native_kit
from tests.support.kv import caches_of
from tests.worker.swap.test_torch import layout_of, copy_of
from pdstore.format.namespace import Part
from pdstore.worker.swap.native import NativeSwap
layout = layout_of()
swap = NativeSwap(native_kit.open_library(), layout, caches_of(layout, 10))
pid = os.fork()
if pid == 0:
    try:
        swap.gather([copy_of(layout, Part(0, 0), [1, 2], 8)])
    except RuntimeError as error:
        os._exit(0 if "parent process" in str(error) else 1)
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
swap.gather([copy_of(layout, Part(0, 0), [1, 2], 8)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=60
    )
    assert done.returncode == 0
