"""The benchmark of SGLang: its rows, checks and faults, with a stub in the place of the servers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from examples.ports import free_port
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
        assert found[f"{backend} check 640"]["own_cache_to_whole"]["watched"] > 0
    rows = {step: row for step, row in found.items() if isinstance(row, dict)}
    faults = {step: row for step, row in rows.items() if "equals_one_server" in row}
    assert {step: row["d_computed"] for step, row in faults.items()} == {
        "pdstore-shm pages damaged": 640,
        "pdstore-shm D restarted over a warm pool": 64,
        "pdstore-shm P killed after its answer": 64,
        "pdstore-shm store gone": 640,
    }
    for row in faults.values():  # compared with a server that computed as much
        assert row["one_server_computed"] == row["d_computed"]
        assert row["equals_one_server"]
        assert row["d_to_one_server"] == {"watched": 0.0, "answer": 0.0}
    assert found["pdstore-shm pages damaged"]["d_computed_when_saved_again"] == 64
