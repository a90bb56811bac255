"""What the wheels of Ray Serve and Dynamo do with pdstore's connector, by their own classes.

One release of each is run, by test_ray_serve.py and test_dynamo.py; these are the newest wheels.
The requests that CI replays (tests/support/other_routers.py) are compared with those of Ray's.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from pdstore.adapters.vllm import plugin
from tests.support.other_routers import REMOTE, RayServe

PROTOCOLS = "dynamo.vllm.kv_connector_protocols"
BACKENDS = "ray.llm._internal.serve.engines.vllm.kv_transfer.base"
PARAMS = {"handoff": "of P"}

pytestmark = pytest.mark.nightly


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """Loads one module of a package's newest wheel: `module_of("ray", "ray.llm.base")`."""

    def load(package: str, name: str):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(tmp_path), package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        [wheel] = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            source = archive.extract(name.replace(".", "/") + ".py", tmp_path)
        spec = importlib.util.spec_from_file_location(name, source)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_dynamo_hands_over_with_the_connector_as_with_nixls(module_of):
    protocols = module_of("ai-dynamo", PROTOCOLS)
    transfer = SimpleNamespace(kv_connector=plugin.NAME)
    config = SimpleNamespace(kv_transfer_config=transfer)
    with pytest.raises(ValueError, match=f"Unsupported kv_connector='{plugin.NAME}'"):
        protocols.make_kv_connector_protocol(config)
    plugin.register()
    protocol = protocols.make_kv_connector_protocol(config)
    assert protocol.prefill_request_kv_transfer_params() == REMOTE
    answered = SimpleNamespace(kv_transfer_params=PARAMS)
    assert protocol.decode_request_kv_transfer_params(answered) == PARAMS


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_ray_serve_sends_what_is_replayed(module_of, monkeypatch, is_chat):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=None))
    backend = module_of("ray", BACKENDS).DefaultConnectorBackend(None)
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
    body = {"model": "tiny", **asked, "max_tokens": 5, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    kind = ChatCompletionRequest if is_chat else CompletionRequest
    request = kind(**body)
    ask_p = backend.prepare_prefill_request(request=request, peer=None)
    answered = SimpleNamespace(kv_transfer_params=PARAMS)
    ask_d = backend.prepare_decode_request(request=request, peer=None, prefill_response=answered)
    replayed = RayServe.ask_p(body), RayServe.ask_d(body, {"kv_transfer_params": PARAMS})
    for sent, ours in zip((ask_p, ask_d), replayed, strict=True):
        same = kind(**ours)
        same.request_id = sent.request_id  # which is random
        assert sent.model_dump() == same.model_dump()
