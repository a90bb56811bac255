"""Objects of the library are closed in time, at exit and on SIGTERM, or left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdstore.store.mooncake.closing import close_in_time

OWNER = """
import os, sys, time
from pdstore.store.mooncake.closing import close_at_exit, close_on_sigterm
class Owner:
    def refuse(self):
        print("refuses", flush=True)
    def close(self, drain_s, close_s):
        print("closed", flush=True)
    def set_aside(self):
        print("aside", flush=True)
owner = Owner()
close_at_exit(owner)
print("ready", flush=True)
"""


class Object:
    """An object of the library whose `close` waits for `gate`."""

    def __init__(self) -> None:
        self.gate, self.is_closed = threading.Event(), threading.Event()

    def close(self) -> int:
        self.gate.wait(10)
        self.is_closed.set()
        return 0


def test_an_object_is_closed_before_the_call_returns(caplog):
    one = Object()
    one.gate.set()
    close_in_time(one, "x")
    assert one.is_closed.is_set()
    assert not caplog.text


def test_an_object_that_does_not_close_is_left_alone_with_a_warning(caplog):
    one = Object()
    close_in_time(one, "x", timeout_s=0.05)
    assert not one.is_closed.is_set()
    assert "x: close did not end within 0.05 s" in caplog.text
    one.gate.set()


def test_an_object_is_closed_where_no_thread_can_start(monkeypatch):
    """From Python 3.12 on that is so while the interpreter ends."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    one = Object()
    one.gate.set()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    close_in_time(one, "x")
    assert one.is_closed.is_set()


def run(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER + code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_an_owner_is_closed_at_exit():
    with run("") as process:
        assert process.communicate(timeout=60)[0].split() == ["ready", "refuses", "closed"]
    assert process.returncode == 0


def test_no_owner_takes_calls_while_another_is_closed_at_exit():
    with run(
        "others = Owner(), Owner()\nfor each in others:\n    close_at_exit(each)\n"
    ) as process:
        said = process.communicate(timeout=60)[0].split()
    assert said == ["ready", *["refuses"] * 3, *["closed"] * 3]


def test_an_owner_is_set_aside_in_a_forked_child_and_closed_in_the_parent_alone():
    code = "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\n"
    with run(code) as process:
        assert process.communicate(timeout=60)[0].split() == ["ready", "aside", "refuses", "closed"]


OWN_HANDLER = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
"""


@pytest.mark.parametrize(("handler", "status"), [("", -signal.SIGTERM), (OWN_HANDLER, 3)])
def test_sigterm_closes_and_ends_the_process_as_the_program_wants(handler, status):
    code = f"{handler}\nclose_on_sigterm()\nos.kill(os.getpid(), 15)\ntime.sleep(10)\n"
    with run(code) as process:
        assert process.communicate(timeout=60)[0].split() == ["ready", "refuses", "closed"]
    assert process.returncode == status
