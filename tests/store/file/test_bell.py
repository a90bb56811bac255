"""Bell: no wake is missed in any process, a kill leaves nothing, no other file is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pdstore.store.file.bell import Bell


@pytest.fixture
def bell(tmp_path, closed_after):
    return closed_after(Bell(tmp_path))


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


def test_a_listener_whose_folder_was_removed_watches_another_and_misses_nothing(tmp_path, bell):
    seen = bell.wait_for_wake(None, 0.0)
    (tmp_path / "bells").rmdir()
    now = bell.wait_for_wake(seen, 30.0)
    assert now != seen, "anything may have been stored"
    again = bell.wait_for_wake(now, 0.0)
    Bell(tmp_path).wake_all()
    assert bell.wait_for_wake(again, 30.0) != again


def test_a_killed_listener_and_puts_leave_nothing(tmp_path, bell):
    with listener(tmp_path) as other:
        assert other.stdout.readline() == "listens\n"
        other.send_signal(signal.SIGKILL)
    bell.wake_all()
    assert os.listdir(tmp_path / "bells") == []


def test_a_link_in_the_folders_place_is_not_followed(tmp_path, bell):
    (tmp_path / "other").mkdir()
    (tmp_path / "bells").symlink_to("other")
    with pytest.raises(OSError):
        bell.wait_for_wake(None, 0.0)
    bell.wake_all()
