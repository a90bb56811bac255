"""build: CMake runs once for each content of the sources, and its errors are passed on."""

from __future__ import annotations

import threading

import pytest

from pdstore.errors import NativeError
from pdstore.native.build import build_library, find_built


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
