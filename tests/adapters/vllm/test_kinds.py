"""Every kind of KV cache: vLLM answers a prompt of which a part was loaded as transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAX_LOGPROB_DIFF = 1e-4

# Prompts of 150, 204, 79, 350 and 150 tokens; in whole blocks the first has 144 or 128 of them.
LOADED = {
    "llama": [0, 128, 64, 128, 150],
    "qwen3": [0, 128, 64, 128, 150],
    "gemma3": [0, 128, 64, 128, 149],
    "mla": [0, 144, 64, 144, 150],
}


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", LOADED)
def test_a_prompt_that_is_loaded_in_part_is_answered_as_transformers_does(
    kind: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_against_transformers", kind, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [loaded for loaded, *_ in rows] == LOADED[kind]
    assert all(is_same for _, is_same, _ in rows)
    assert max(diff for *_, diff in rows) < MAX_LOGPROB_DIFF
