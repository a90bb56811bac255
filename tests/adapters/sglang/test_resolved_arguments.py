"""SGLang's arguments from 0.5.19 on: ServerArgs keeps what was typed, a function tells more."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from pdstore.errors import ConfigError
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel

# isort: split
from pdstore.adapters.sglang.pages import ServerArguments, server_arguments

RESOLVING = "sglang.srt.arg_groups.overrides"


@pytest.fixture
def resolves(monkeypatch):
    """Lets SGLang resolve as 0.5.19 does; returns what a server gives to `arguments`.

    `resolves({"enable_lora": True}, lora_paths=[...])`: what was decided, and what was typed.
    """

    def resolution_result(args, field, default=None):
        for _, declared in reversed(vars(args)["_resolved_overrides"]):
            if field in declared:
                return declared[field]
        return getattr(args, field, default)

    module = importlib.import_module(RESOLVING)
    if not hasattr(module, "resolution_result"):  # else it is SGLang's own
        monkeypatch.setattr(module, "resolution_result", resolution_result, raising=False)

    def resolves(decided: dict[str, object], **typed: object) -> dict[str, object]:
        return {**typed, "_raw_input": typed, "_resolved_overrides": [("a hook", decided)]}

    return resolves


@pytest.mark.parametrize(
    ("typed", "decided"),
    [
        ({"lora_paths": ["name=/adapters/a"]}, {"enable_lora": True}),
        ({"lora_paths": ["name=/adapters/a"], "enable_lora": False}, {"lora_paths": []}),
        ({}, {"enable_lora": True}),
        ({"enable_lora": True}, {}),
    ],
)
def test_lora_is_refused_wherever_it_was_turned_on(serve, resolves, typed, decided):
    with pytest.raises(ConfigError, match="LoRA"):
        serve(wheel.mha_pool(), arguments=resolves(decided, **typed))


@pytest.mark.parametrize("lora_paths", [None, []])
def test_a_server_without_lora_starts(serve, resolves, lora_paths):
    server = serve(wheel.mha_pool(), arguments=resolves({"lora_paths": lora_paths}))
    hashes = kit.page_hashes(3)
    assert server.backup(hashes, range(3)) == 3


def test_each_argument_is_read_as_it_was_resolved(serve, resolves):
    """The load format stands for all: `auto` was typed, and SGLang decided for `dummy`."""
    with pytest.raises(ConfigError, match="PDSTORE_WEIGHTS"):
        serve(wheel.mha_pool(), arguments=resolves({"load_format": "dummy"}))
    arguments = server_arguments()
    assert arguments.load_format == "dummy"
    assert arguments.typed.load_format == "auto"
    with pytest.raises(AttributeError):
        _ = arguments.no_such_argument


def test_quantization_that_sglang_found_out_is_another_namespace(serve, resolves):
    hashes = kit.page_hashes(3)
    serve(wheel.mha_pool(), arguments=resolves({})).backup(hashes, range(3))
    other = serve(wheel.mha_pool(), arguments=resolves({"quantization": "fp8"}))
    assert other.backend.batch_exists(hashes) == 0


def test_a_server_whose_resolved_arguments_cannot_be_read_is_refused(resolves, monkeypatch):
    arguments = types.SimpleNamespace(**resolves({}))
    monkeypatch.setitem(sys.modules, RESOLVING, None)
    with pytest.raises(ConfigError, match="how this SGLang resolved its arguments"):
        ServerArguments(arguments)
