"""Each version of SGLang that pdstore supports, tried by the classes of its own wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

RELEASES = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
FIRST_WITH_SIDECARS = "0.5.23"  # the tests of host pools beside KV are not for older ones

pytestmark = pytest.mark.nightly


@pytest.fixture(params=RELEASES)
def wheel(request) -> Path:
    """The wheel of a release, downloaded once into pytest's cache, in a directory of its own."""
    release = request.param
    directory = Path(request.config.cache.mkdir(f"sglang-{release}"))
    if not list(directory.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(directory), f"sglang=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, f"SGLang {release} could not be downloaded: {done.stderr}"
    (found,) = directory.glob("*.whl")
    return found


def test_the_documents_name_these_releases():
    from pdstore.adapters.sglang.pages import VERSIONS

    assert f"{RELEASES[0]} to {RELEASES[-1]}" == VERSIONS
    assert f"pdstore supports SGLang {VERSIONS}." in (ROOT / "docs" / "sglang.md").read_text()


def test_all_that_is_tested_holds_with_this_release(wheel):
    """The tests beside this one, in a process of their own; none of them may be skipped."""
    here = Path(__file__).relative_to(ROOT)
    chosen = ["-p", "no:cacheprovider", "-m", "not nightly or redis", f"--ignore={here}"]
    if FIRST_WITH_SIDECARS not in wheel.name:
        without = ("test_sidecars.py", "test_drafts.py")
        chosen += [f"--ignore={here.parent}/{name}" for name in without]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, str(here.parent)],
        cwd=ROOT,
        env={**os.environ, "TEST_SGLANG_WHEELS": str(wheel.parent)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]


def test_arguments_are_read_as_this_release_resolved_them(wheel, tmp_path):
    adapter = tmp_path / "adapter"
    given = {
        "--load-format": "dummy",
        "--revision": "a-commit",
        "--context-length": "128",
        "--json-model-override-args": '{"rope_theta": 5}',
        "--hicache-storage-prefetch-policy": "wait_complete",
    }
    lora = ["--lora-paths", f"name={adapter}"]
    options = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"]
    lines = [[], [each for pair in given.items() for each in pair], lora, options, lora]
    plain, full, by_paths, by_option, again = told_by(wheel, tmp_path, lines)
    for told in (plain, full, by_paths, by_option):
        assert told["pdstores"] == told["sglangs"]
    assert plain["refusal"] is full["refusal"] is None
    read = full["pdstores"]
    assert [read[name[2:].replace("-", "_")] for name in given] == [
        int(value) if value.isdigit() else value for value in given.values()
    ]
    for told in (by_paths, by_option):
        assert told["pdstores"]["enable_lora"] is True
        assert "does not support LoRA" in told["refusal"]
    # SGLang names an adapter by its path, not by its files: that is why it is refused
    assert by_paths["adapters"] == again["adapters"]
    assert len(again["adapters"]) == 1


def told_by(wheel: Path, directory: Path, lines: list[list[str]]) -> list[dict]:
    """Returns what `tests.support.sglang_arguments` says of each command line."""
    model = directory / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16"}
    rest = {"vocab_size": 512, "max_position_embeddings": 2048, "torch_dtype": "float16"}
    (model / "config.json").write_text(json.dumps({**names, **sizes, **heads, **rest}))
    program = [sys.executable, "-m", "tests.support.sglang_arguments", str(wheel), str(model)]
    done = subprocess.run(
        [*program, json.dumps(lines)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
