"""P and D of one PDSTORE_WEIGHTS that differ in what no key has: D's log names it, as processes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack

import pytest
import torch
import transformers

from examples.train_checkpoint import train_tokenizer
from tests.support.mini_engine_kit import SHAPES, until
from tests.support.mini_process import MiniProcess

TEXT = "A block is stored under its key, and the key is made of tokens. " * 3


@pytest.fixture(scope="module")
def log(checkpoints, tmp_path_factory):
    """D's log after some hand-offs of a P with another tokenizer and other weights."""
    directory = tmp_path_factory.mktemp("unlike")
    theirs, ours = checkpoints["llama"], directory / "ours"
    shutil.copytree(theirs, ours)
    torch.manual_seed(2)
    transformers.AutoModelForCausalLM.from_config(SHAPES["llama"]()).save_pretrained(ours)
    train_tokenizer([TEXT], 300).save_pretrained(ours)
    pd = {
        "PD_TRANSFER_VIA_STORAGE": "1",
        "PDSTORE_STORE": f"file://{directory}/pool",
        "PDSTORE_STAGING": "8MiB",
        "PDSTORE_WEIGHTS": "prod",
        "PDSTORE_HANDOFF_WAIT_S": "3",
    }
    with ExitStack() as stack:
        p = MiniProcess(stack, directory, "prefill", theirs, **pd)
        d = MiniProcess(stack, directory, "decode", ours, **pd)
        until(p.is_ready)
        until(d.is_ready)

        def is_told():
            params = p.ask(prompt=TEXT, max_tokens=1).json()["kv_transfer_params"]
            d.ask(prompt=TEXT, kv_transfer_params=params).raise_for_status()
            return "weights' files" in d.log and "tokenizer" in d.log

        until(is_told)
        is_told()
        for one in (p, d):
            one.stop()
        yield d.log


def test_another_tokenizer_is_told_with_both_counts_and_not_as_eviction(log):
    assert "not the same ones: tokenizer or chat template differ" in log
    assert "give both instances the same --tokenizer and --chat-template" in log
    assert "evict" not in log


def test_other_weights_of_one_name_are_told_once(log):
    assert log.count("although PDSTORE_WEIGHTS is prod on both: if the weights differ too") == 1
    assert "Give each checkpoint a PDSTORE_WEIGHTS of its own, or unset it on both" in log
