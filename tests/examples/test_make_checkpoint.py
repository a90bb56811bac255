"""The tiny checkpoint is an ordinary one, the same each time, and there whole or not at all."""

from __future__ import annotations

import sys

import pytest
import transformers

from examples import make_checkpoint as maker


@pytest.fixture(autouse=True)
def documents(monkeypatch):
    """Reads the documents once: a file may be edited during a test."""
    texts = maker.documents_of_repository()
    monkeypatch.setattr(maker, "documents_of_repository", lambda: texts)


def test_it_is_an_ordinary_checkpoint_with_two_kv_heads(tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "checkpoint"
    monkeypatch.setattr(sys, "argv", ["make_checkpoint", "--out", str(out), "--steps", "3"])
    maker.main()
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert model.config.num_key_value_heads == 2
    assert model.config.max_position_embeddings == 2048
    assert tokenizer.decode(tokenizer("Any text: é€, 漢字").input_ids) == "Any text: é€, 漢字"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
