"""docs/sglang.md: its flags are SGLang's, and its extra config opens the backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile

from tests.docs.commands import ROOT
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel

COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
Metrics().miss(Reason.ABSENT)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
PAGE = (ROOT / "docs" / "sglang.md").read_text()


def test_the_flags_of_the_page_are_sglangs():
    (command,) = re.findall(r"^sglang serve .*?(?=\n```)", PAGE, re.MULTILINE | re.DOTALL)
    with zipfile.ZipFile(wheel.WHEEL) as opened:
        arguments = opened.read("sglang/srt/server_args.py").decode()
        assert "sglang/cli/serve.py" in opened.namelist()
    flags = re.findall(r"--([a-z-]+)", command)
    assert len(flags) > 7
    assert not [f for f in flags if f"\n    {f.replace('-', '_')}: A[" not in arguments]


def test_the_extra_config_of_the_page_opens_the_backend():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(text) == kit.DYNAMIC


def test_metrics_are_where_sglang_collects_those_of_its_processes(tmp_path):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", COLLECT], env=environment, capture_output=True, text=True, timeout=60
    )
    assert 'pdstore_misses_total{reason="absent"} 1.0' in shown.stdout, shown.stderr
