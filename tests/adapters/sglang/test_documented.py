"""docs/sglang.md and the scripts: their flags are SGLang's, their extra config is the backend's."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile

from examples.sglang_serve import EXTRA_CONFIG
from tests.docs.commands import ROOT
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel

COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from pdstore.metrics import Metrics
from pdstore.errors import Reason
Metrics().miss(Reason.ABSENT)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
ARGUMENTS = re.compile(r"sglang/srt/(server_args|arg_groups/fields/\w+)\.py")
PAGE = (ROOT / "docs" / "sglang.md").read_text()


def foreign_flags(command: str) -> list[str]:
    """The flags of a command that SGLang's own arguments do not know."""
    with zipfile.ZipFile(wheel.WHEEL) as opened:
        names = opened.namelist()
        places = [name for name in names if ARGUMENTS.fullmatch(name)]
        arguments = "".join(opened.read(name).decode() for name in places)
    assert {"sglang/cli/serve.py", "sglang/launch_server.py"} <= set(names)
    flags = re.findall(r"--([a-z-]+)", command)
    assert len(flags) > 7
    return [f for f in flags if f"\n    {f.replace('-', '_')}: A[" not in arguments]


def test_the_flags_of_the_page_are_sglangs():
    (command,) = re.findall(r"^sglang serve .*?(?=\n```)", PAGE, re.MULTILINE | re.DOTALL)
    assert not foreign_flags(command)


def test_the_flags_of_the_scripts_are_sglangs(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    scripts = re.findall(r"^(examples/run_.* --engine sglang .*)$", PAGE, re.MULTILINE)
    assert len(scripts) == 2
    for line in scripts:
        asked = shlex.split(line.replace("/models/m", str(tmp_path)))
        done = subprocess.run(
            [*asked, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        role = asked[0].removeprefix("examples/run_").removesuffix(".sh")
        assert done.stdout.startswith(f"PD_TRANSFER_VIA_STORAGE=1 PDSTORE_ROLE={role} "), done
        assert not foreign_flags(done.stdout)


def test_the_extra_config_of_the_page_opens_the_backend():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(text) == EXTRA_CONFIG
    assert EXTRA_CONFIG.items() >= kit.DYNAMIC.items()


def test_metrics_are_where_sglang_collects_those_of_its_processes(tmp_path):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", COLLECT], env=environment, capture_output=True, text=True, timeout=60
    )
    assert 'pdstore_misses_total{reason="absent"} 1.0' in shown.stdout, shown.stderr
