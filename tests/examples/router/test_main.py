"""The router's process."""

from __future__ import annotations

import signal
import subprocess
import sys

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


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_is_there_for_this_host_alone_and_stops_cleanly(
    stop: signal.Signals,
) -> None:
    with listening() as sock, nobody() as gone:
        port = str(sock.getsockname()[1])
    command = [sys.executable, "-m", "examples.router", "--prefill", gone, "--decode", gone]
    with child([*command, "--port", port], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "running on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert addresses_of(int(port)) == ["127.0.0.1"]
        process.send_signal(stop)
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in rest
    assert process.returncode == 0


@pytest.mark.parametrize("option", ["--port", "--status"])
def test_a_port_that_is_none_is_said(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prefill", "http://p", "--decode", "http://d", option, "65536"])
    assert f"argument {option}: not a port: 65536" in capsys.readouterr().err


def test_p_s_first_token_needs_d_to_be_asked_behind_p(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prefill", "http://p", "--decode", "http://d", "--mode", "concurrent"]
    with pytest.raises(SystemExit):
        main([*options, "--first-token", "prefill"])
    assert "needs --mode relay" in capsys.readouterr().err
