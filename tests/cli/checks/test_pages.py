"""Checks of a pool's memory: huge pages by the mount that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdstore.cli.checks.finding import Level
from pdstore.cli.checks.pages import check_file_pages, check_pages
from pdstore.cli.doctor import Asked, doctor
from tests.support.command import run_json

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
25 22 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,inode64
30 22 0:30 / /mnt/pool rw - tmpfs tmpfs rw,size=73400320k,huge=always
31 22 0:31 / /mnt/pool/advised rw - tmpfs tmpfs rw,huge=advise
"""


@pytest.mark.parametrize(
    ("directory", "num_gpus", "level"),
    [
        ("/mnt/pool", 2, Level.OK),
        ("/mnt/pool/advised", 2, Level.WARN),
        ("/dev/shm", 2, Level.WARN),
        ("/dev/shm", 0, Level.INFO),
        ("/dev/shmother", 2, Level.INFO),  # on the disk
    ],
)
def test_a_tmpfs_without_huge_pages_is_yellow_where_there_are_gpus(directory, num_gpus, level):
    [finding] = check_pages(Path(directory) / "pdstore-0-pool", MOUNTS, num_gpus)
    assert finding.level is level
    assert ("huge=always" in (finding.remedy or "")) is (level is Level.WARN)


@pytest.mark.parametrize(
    ("directory", "num_gpus", "level"),
    [
        ("/mnt/pool/files", 2, Level.OK),
        ("/mnt/pool/advised/files", 2, Level.WARN),
        ("/dev/shm/pool", 2, Level.WARN),
        ("/dev/shm/pool", 0, Level.INFO),
    ],
)
def test_files_in_a_tmpfs_without_huge_pages_are_yellow_where_there_are_gpus(
    directory, num_gpus, level
):
    [finding] = check_file_pages(Path(directory), MOUNTS, num_gpus)
    assert finding.level is level
    assert ("huge=within_size" in finding.remedy) is (level is Level.WARN)


def test_nothing_is_said_of_the_pages_of_a_disk():
    assert list(check_file_pages(Path("/var/pool"), MOUNTS, 2)) == []


def test_the_doctor_looks_at_the_pages_of_files(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"{MOUNTS}40 22 0:40 / {tmp_path} rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr("pdstore.cli.doctor.MOUNTS", mounts)
    document = doctor(Asked(f"file://{tmp_path}/pool"), lambda: 0).document
    assert [f["level"] for f in document["findings"] if f["subject"] == "huge pages"] == ["info"]


def test_the_doctor_looks_at_an_arenas_pages(tmp_path):
    document = run_json("doctor", "--store", f"shm://pages?size=1GiB&slab=4MiB&dir={tmp_path}")
    assert "huge pages" in {finding["subject"] for finding in document["findings"]}
