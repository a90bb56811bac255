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
    ("check", "path", "num_gpus", "level"),
    [
        (check_pages, "/mnt/pool/pdstore-0-pool", 2, Level.OK),
        (check_pages, "/mnt/pool/advised/pdstore-0-pool", 2, Level.WARN),
        (check_pages, "/dev/shm/pdstore-0-pool", 2, Level.WARN),
        (check_pages, "/dev/shm/pdstore-0-pool", 0, Level.INFO),
        (check_pages, "/dev/shmother/pdstore-0-pool", 2, Level.INFO),  # on the disk
        (check_file_pages, "/mnt/pool/files", 2, Level.OK),
        (check_file_pages, "/mnt/pool/advised/files", 2, Level.WARN),
        (check_file_pages, "/dev/shm/pool", 2, Level.WARN),
        (check_file_pages, "/dev/shm/pool", 0, Level.INFO),
    ],
)
def test_a_tmpfs_without_huge_pages_is_yellow_where_there_are_gpus(check, path, num_gpus, level):
    [finding] = check(Path(path), MOUNTS, num_gpus)
    kind = {check_pages: "huge=always", check_file_pages: "huge=within_size"}[check]
    assert finding.level is level
    assert (kind in (finding.remedy or "")) is (level is Level.WARN)


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
