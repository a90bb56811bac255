"""`make release`: the sources, and wheels that run on old systems of both processors."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from pdstore.format.block import checksum

ROOT = Path(__file__).resolve().parents[2]
VALUE = bytes(range(200))
SUM = checksum(memoryview(VALUE))
AARCH64 = Path("/usr/aarch64-linux-gnu")
LOADER = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int main(int argc, char **argv) {
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return puts(dlerror()), 1;
  int32_t (*sum)(const uint64_t *, const int64_t *, int64_t, uint64_t *);
  *(void **)&sum = dlsym(library, "pds_sum_values");
  uint8_t value[200];
  for (int i = 0; i < 200; i++) value[i] = i;
  uint64_t address = (uint64_t)(uintptr_t)value, result = 0;
  int64_t size = sizeof value;
  int32_t code = sum(&address, &size, 1, &result);
  printf("%llu", (unsigned long long)result);
  return code;
}
"""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def release():
    """The directory in which the release lies."""
    done = subprocess.run(["make", "-s", "release"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ROOT / "dist"


def wheel(release: Path, processor: str) -> Path:
    [path] = release.glob(f"pdstore-*-py3-none-manylinux*_{processor}.whl")
    return path


def test_there_are_the_sources_and_a_wheel_for_each_processor(release):
    assert len(list(release.iterdir())) == 5
    assert len(list(release.glob("pdstore_lmcache-*"))) == 2
    assert len(list(release.glob("pdstore-*.tar.gz"))) == 1


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_a_wheel_has_the_package_and_the_library_and_nothing_else(release, processor):
    with zipfile.ZipFile(wheel(release, processor)) as archive:
        names = archive.namelist()
    assert "pdstore/libpdstore.so" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"pdstore"}


def test_the_library_for_aarch64_sums_a_value_as_everywhere(release, tmp_path):
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None or not AARCH64.exists():
        pytest.skip("needs Debian's qemu-user-static and libc6-arm64-cross")
    (tmp_path / "loader.c").write_text(LOADER)
    with zipfile.ZipFile(wheel(release, "aarch64")) as archive:
        library = archive.extract("pdstore/libpdstore.so", tmp_path)
    python, target = ROOT / ".venv-release/bin/python", ("-target", "aarch64-linux-gnu.2.28")
    compiler = [str(python), "-m", "ziglang", "cc", *target]
    subprocess.run([*compiler, "loader.c", "-o", "loader"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [emulator, "-L", str(AARCH64), "./loader", library], cwd=tmp_path, capture_output=True
    )
    assert done.stdout.decode() == str(SUM)
