"""The benchmark of SGLang: its rows, checks and faults, with a stub in the place of the servers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdstore.cli.ports import free_port
from tests.docs.commands import ROOT

SHAPE = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 500},
    **{"torch_dtype": "bfloat16"},
}


@pytest.mark.nightly
def test_each_backend_is_measured_checked_and_broken_with_stubs_for_servers(tmp_path):
    out, backends = tmp_path / "found.json", ["pdstore-shm", "file"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.sglang_gpu", "--json", out, "--pool", tmp_path),
            *("--launch=-m tests.support.sglang_stub", "--settle=0", "--runs=1", "--faults"),
            *("--config", json.dumps(SHAPE), "--port", str(free_port()), "--tokens", "640"),
            *("--backends", *backends),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    report = json.loads(out.read_text())
    assert not report["failures"], done.stderr
    found = {each["step"]: each["found"] for each in report["steps"]}
    for backend in backends:
        assert found[f"{backend} check 640"]["d_equals_whole"]
        assert not found[f"{backend} check 640"]["control_other_pages"]
        assert found[f"{backend} check 640"]["d_to_p"] == {"watched": 0.0, "answer": 0.0}
        assert found[f"{backend} 640 at once median of 1"]["d_computed"] == 64
    rows = [each for each in found.values() if isinstance(each, dict)]
    assert [row["equals_one_server"] for row in rows if "equals_one_server" in row] == [True] * 4
