"""The demo's parts: its judgement, its processes, its prompts. The whole is `make demo`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from examples.demo import processes
from examples.demo.conversation import Conversation
from examples.demo.pools import choose
from examples.demo.processes import DemoError, Processes
from examples.demo.report import Run, Runs, problems_of, verdict
from examples.demo.row import Row

DEADLINE_S = 20
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

GOOD = Row(130, 129, 1, 0.02, True, 2e-7)
ON = Run(rows=[GOOD, GOOD], used=900, saved=130, loaded=260, computed=2)
PLAIN = replace(ON, saved=0)
OFF = Run([replace(GOOD, loaded_tokens=0, computed_tokens=130)] * 2, 0, 0, 0, 260)
TURNS = Conversation([GOOD, GOOD], known=350, loaded_on_p=320)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("on", "problem"),
    [
        (replace(ON, rows=[GOOD, replace(GOOD, same_ids=False)]), "prompt 2: the answer"),
        (replace(ON, rows=[replace(GOOD, max_logprob_diff=2e-3), GOOD]), "prompt 1: the ans"),
        (replace(ON, rows=[replace(GOOD, computed_tokens=2), GOOD]), "D computed 2 tokens"),
        (replace(ON, loaded=257), "counted 257 loaded tokens"),
        (replace(ON, loaded=0, rows=[replace(GOOD, loaded_tokens=0)] * 2), "counted 0 loaded tok"),
        (replace(ON, loaded=261), "counted 261 loaded tokens"),
        (replace(ON, computed=3), "D computed 3 prompt tokens"),
    ],
)
def test_whatever_breaks_the_promise_is_said(on: Run, problem: str) -> None:
    (found,) = problems_of(Runs(on, PLAIN, OFF, TURNS))
    assert problem in found
    assert verdict(on, [found]).startswith("FAILED: 1 ")
    assert problem in verdict(on, [found])
    (found_behind_proxy,) = problems_of(Runs(ON, on, OFF, TURNS))
    assert found_behind_proxy == f"plain proxy: {found}"


def test_a_child_that_ends_early_fails_the_wait_with_its_log(logs: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('first'); sys.exit('no such thing')"]
    with Processes() as children:
        children.start("child", command, lambda: False)
        with pytest.raises(DemoError, match=r"(?s)child ended with status 1.*no such thing"):
            children.wait_ready(DEADLINE_S, lambda text: None)
    assert sorted((logs / "child.log").read_text().splitlines()) == ["first", "no such thing"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("signal_handlers")
def test_a_signal_stops_everything(number: signal.Signals) -> None:
    processes.stop_on_signals()
    children = Processes()
    started = children.start("child", SLEEP, lambda: True)

    def be_stopped() -> None:
        with children:
            os.kill(os.getpid(), number)
            time.sleep(DEADLINE_S)

    with pytest.raises(KeyboardInterrupt):
        be_stopped()
    assert started.popen.returncode == -signal.SIGTERM


URL = "redis://:secret@h:1/0"
URL_LINE = "redis://:***@h:1/0 (PDSTORE_STORE)"


@pytest.mark.parametrize(
    ("given", "variables", "line"),
    [
        (None, {}, "file, a fresh one (neither --store nor PDSTORE_STORE)"),
        ("redis", {"PDSTORE_STORE": URL}, "redis, a fresh one (--store)"),
        (None, {"PDSTORE_STORE": URL, "MOONCAKE_MASTER": "h:2"}, URL_LINE),
        (f"shm://a?size=1GiB {URL}", {}, "shm://a redis://:***@h:1/0 (--store)"),
        (None, {"MOONCAKE_MASTER": "h:2"}, "mooncake:// (MOONCAKE_MASTER=h:2)"),
        (None, {(name := "MOONCAKE_MASTER_SERVER_ADDR"): "h:2"}, f"mooncake:// ({name}=h:2)"),
        (None, {"MOONCAKE_CONFIG_PATH": "/x"}, "mooncake:// (MOONCAKE_CONFIG_PATH=/x)"),
    ],
)
def test_the_pool_is_the_users_unless_another_is_asked_for(
    given: str | None, variables: dict[str, str], line: str
) -> None:
    assert str(choose(given, variables)) == line
