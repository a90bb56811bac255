"""The router's process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from examples.router.__main__ import main
from tests.support.child import child
from tests.support.listeners import addresses_of
from tests.support.router_kit import (
    DEADLINE_S,
    listening,
    nobody,
)

pytestmark = pytest.mark.anyio


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yields the process, with what it says by then read, and its port."""
    with listening() as sock, nobody() as gone:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "examples.router", "--prefill", gone, "--decode", gone]
    with child(
        [*command, "--port", str(port), *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = ""
        while "running on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, port


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_is_there_for_this_host_alone_and_stops_cleanly(
    stop: signal.Signals,
) -> None:
    with started() as (process, port):
        assert addresses_of(port) == ["127.0.0.1"]
        process.send_signal(stop)
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in rest
    assert process.returncode == 0


@pytest.mark.parametrize("option", ["--prefill", "--decode"])
@pytest.mark.parametrize("ending", ["/v1", "/v1/"])
def test_a_url_with_v1_is_refused_with_the_one_to_write(
    option: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:8100{ending}"
    with pytest.raises(SystemExit):
        main(["--prefill", "http://p", "--decode", "http://d", option, url])
    said = f"argument {option}: {url}: write http://127.0.0.1:8100, the router adds /v1 itself"
    assert said in capsys.readouterr().err


def test_p_s_first_token_needs_d_to_be_asked_behind_p(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prefill", "http://p", "--decode", "http://d", "--mode", "concurrent"]
    with pytest.raises(SystemExit):
        main([*options, "--first-token", "prefill"])
    assert "needs --mode relay" in capsys.readouterr().err
