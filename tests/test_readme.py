"""The README's example runs and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_hands_a_prompt_over():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    check = "\nassert job.result.num_tokens == 200"
    check += "\nassert all(torch.equal(p[:12], d[13:25]) for p, d in zip(p_kv, d_kv))"
    check += "\nassert all(torch.equal(p[12, :8], d[25, :8]) for p, d in zip(p_kv, d_kv))"
    out = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout == "JobResult(num_tokens=200, reason=None, error=None)\n"
