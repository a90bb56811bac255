"""The shared flags of benchmarks: paths and Ctrl-C end a program without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.command import run
from benchmarks.report import Report


def test_a_file_that_cannot_be_written_ends_it_before_it_has_measured(tmp_path):
    measured = []
    with pytest.raises(SystemExit, match="nowhere"):
        run(lambda: measured.append(1), tmp_path / "nowhere" / "x.json")
    assert not measured


def test_ctrl_c_is_no_traceback():
    def interrupted() -> Report:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run(interrupted, None)
    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["benchmarks.stores", "--directory", "/nowhere"], "/nowhere"),
        (["benchmarks.swap.start"], "GPU"),
    ],
)
def test_what_a_benchmark_lacks_is_one_line(command, said):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("this machine has it")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
