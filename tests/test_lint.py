"""Code that could open a door is refused, and secrets are found."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.secret import KEY, PASSWORD, SecretSearch

ROOT = Path(__file__).parent.parent
RUFF = Path(sys.executable).with_name("ruff")
LMCACHE = "integrations/lmcache/pdstore_lmcache"

REFUSED = {
    "import pickle\n\npickle.loads(b'')\n": "S301",
    "import shelve\n\nshelve.open('x')\n": "S301",
    "import marshal\n\nmarshal.loads(b'')\n": "S302",
    "eval('1')\n": "S307",
    "exec('1')\n": "S102",
    "import yaml\n\nyaml.load('')\n": "S506",
    "import subprocess\n\nsubprocess.run('x', shell=True)\n": "S602",
    "import os\n\nos.system('x')\n": "S605",
    "import uvicorn\n\nuvicorn.run('x', host='0.0.0.0')\n": "S104",
    "import httpx\n\nhttpx.get('https://x', verify=False)\n": "S501",
}


@pytest.mark.parametrize(
    "folder", ["pdstore/store", "pdstore/adapters/vllm", LMCACHE, "pdstore/router"]
)
def test_what_could_execute_or_open_a_door_is_refused(folder):
    """All at once, so that the linter starts once a folder."""
    source = "".join(REFUSED)
    command = [RUFF, "check", "--stdin-filename", f"{folder}/new.py", "--output-format", "concise"]
    said = subprocess.run([*command, "-"], input=source, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1, said.stderr
    found = {line.split(":")[1]: line for line in said.stdout.splitlines() if ": S" in line}
    number = 0
    for snippet, code in REFUSED.items():
        number += snippet.count("\n")
        assert f" {code} " in found.get(str(number), ""), f"{snippet!r}\n{said.stdout}"


def test_no_tensor_file_is_loaded_that_may_be_a_pickle():
    """The linter has no rule for torch.load, and examples may use what it bans elsewhere."""
    for folder in ("pdstore", LMCACHE, "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr == "load":
                    assert ast.unparse(node) != "torch.load", path


@pytest.mark.parametrize("form", [PASSWORD, quote(PASSWORD, safe=""), KEY, str(bytes.fromhex(KEY))])
def test_a_line_or_a_traceback_with_a_secret_is_found(form):
    log, search = logging.Logger("apart"), SecretSearch()
    log.addHandler(search)
    log.debug("connect to %s", f"redis://u:{form}@host")
    log.debug("connect to %s", "redis://u:***@host")
    try:
        raise ValueError(form)
    except ValueError:
        log.exception("failed")
    assert [line.partition("\n")[0][:14] for line in search.found] == [
        "apart: connect",
        "apart: failed",
    ]


def test_a_file_with_a_secret_is_found(tmp_path):
    search = SecretSearch()
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"\xff all is well")
    bad.write_text(f"--user u >{PASSWORD}")
    search.search([good, bad])
    assert [line.startswith(str(bad)) for line in search.found] == [True]
