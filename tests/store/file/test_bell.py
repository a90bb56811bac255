"""Bell: no wake is missed in any process, a kill leaves nothing, no other file is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pdstore.store.file.bell import Bell
from tests.support.kv import eventually


@pytest.fixture
def bell(tmp_path, closed_after):
    return closed_after(Bell(tmp_path))


def pipes(root) -> list[str]:
    return os.listdir(root / "bells")


def test_a_wait_ends_with_a_ring(tmp_path, bell):
    seen = bell.wait_for_wake(None, 0.0)
    threading.Timer(0.02, Bell(tmp_path).wake_all).start()
    start = time.monotonic()
    assert bell.wait_for_wake(seen, 30.0) != seen
    assert time.monotonic() - start < 10


def test_every_thread_that_waits_hears_a_ring(tmp_path, bell):
    seen, heard = bell.wait_for_wake(None, 0.0), []
    threads = [
        threading.Thread(target=lambda: heard.append(bell.wait_for_wake(seen, 30)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    Bell(tmp_path).wake_all()
    for thread in threads:
        thread.join(20)
    assert len(heard) == 4
    assert seen not in heard


def test_a_directory_that_is_deleted_is_made_again_by_the_next_who_listens(tmp_path, bell):
    bell.wait_for_wake(None, 0.0)
    (tmp_path / "bells" / pipes(tmp_path)[0]).unlink()
    (tmp_path / "bells").rmdir()
    Bell(tmp_path).wake_all()
    seen = bell.wait_for_wake(None, 0.0)
    Bell(tmp_path).wake_all()
    assert bell.wait_for_wake(seen, 10.0) != seen


LISTENER = """
import sys
from pathlib import Path
from pdstore.store.file.bell import Bell
bell = Bell(Path(sys.argv[1]))
seen = bell.wait_for_wake(None, 0.0)
print("listens", flush=True)
print(bell.wait_for_wake(seen, 60.0) != seen, flush=True)
"""


def listener(root):
    return subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(root)], stdout=subprocess.PIPE, text=True
    )


def test_a_ring_is_heard_in_another_process(tmp_path, bell):
    with listener(tmp_path) as other:
        assert other.stdout.readline() == "listens\n"
        bell.wake_all()
        assert other.stdout.readline() == "True\n"


def test_what_a_killed_process_leaves_is_removed_by_the_next_ring(tmp_path, bell):
    with listener(tmp_path) as other:
        assert other.stdout.readline() == "listens\n"
        other.send_signal(signal.SIGKILL)
    assert len(pipes(tmp_path)) == 1
    bell.wake_all()
    eventually(lambda: pipes(tmp_path) == [])


def test_pipes_of_earlier_boots_are_removed_when_nobody_has_touched_them_for_a_day(tmp_path, bell):
    folder, now = tmp_path / "bells", time.time()
    folder.mkdir()
    ages_h = {"boot-1-ended": 25, "boot-1-listens": 23, ".boot-1-killed": 25, ".boot-1-begins": 0}
    for name, hours in ages_h.items():
        os.mkfifo(folder / name)
        os.utime(folder / name, times=(now, now - hours * 3600))
    (folder / "file").touch()
    os.utime(folder / "file", times=(0, 0))
    bell.wake_all()
    assert sorted(pipes(tmp_path)) == [".boot-1-begins", "boot-1-listens", "file"]


def test_a_listener_whose_pipe_was_removed_makes_another_and_misses_nothing(tmp_path):
    with contextlib.closing(Bell(tmp_path, touch_interval_s=0.0)) as bell:
        seen = bell.wait_for_wake(None, 0.0)
        [name] = pipes(tmp_path)
        (tmp_path / "bells" / name).unlink()
        Bell(tmp_path).wake_all()
        now = bell.wait_for_wake(seen, 30.0)
        assert now != seen, "anything may have been stored"
        Bell(tmp_path).wake_all()
        assert bell.wait_for_wake(now, 30.0) != now


def test_only_pipes_are_written_to_and_only_this_kernels_are_removed(tmp_path, bell):
    (tmp_path / "bells").mkdir()
    file, target = tmp_path / "bells" / "file", tmp_path / "target"
    file.write_text("mine")
    target.write_text("mine")
    (tmp_path / "bells" / "link").symlink_to(target)
    os.mkfifo(tmp_path / "bells" / "another-hosts-pipe")
    bell.wake_all()
    assert (file.read_text(), target.read_text()) == ("mine", "mine")
    assert sorted(pipes(tmp_path)) == ["another-hosts-pipe", "file", "link"]
