"""The switch reaches every engine that this vLLM starts, however it is started.

It wraps a function of vLLM's, for which there is no public way (pdstore/adapters/vllm/plugin.py).
The nightly runs these tests with the classes of each supported version.
"""

from __future__ import annotations

import re
from pathlib import Path

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from pdstore.adapters.vllm import plugin


def test_this_vllm_has_what_the_switch_needs(monkeypatch, checkpoints, tmp_path):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setenv("PDSTORE_REQUIRE_STORE", "1")
    monkeypatch.setenv("PDSTORE_STORE", f"file://{tmp_path}/pool")
    plugin.register()
    model = str(checkpoints("llama"))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    served = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model]))
    for engine in (EngineArgs(model=model), served):
        transfer = engine.create_engine_config().kv_transfer_config
        assert transfer.kv_connector == plugin.NAME
        assert KVConnectorFactory.get_connector_class(transfer).__name__ == plugin.NAME


def test_vllm_configures_no_engine_in_another_place():
    """The others are a server without an engine, and two where a part of vLLM is tried alone."""
    root = Path(vllm.__file__).parent
    makers = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if re.search(r"^(?!\s*#|class ).*\bVllmConfig\(", file.read_text(), re.MULTILINE)
    }
    without_engine = {
        "entrypoints/cli/launch.py",  # `vllm launch render`, where it was before 0.31
        "entrypoints/launchers/render/entry.py",
        "v1/spec_decode/ngram_proposer_gpu.py",
        "benchmarks/lib/utils.py",
    }
    assert makers - without_engine == {"engine/arg_utils.py"}
