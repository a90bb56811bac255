"""The tiny checkpoint is an ordinary one, the same each time, and there whole or not at all."""

from __future__ import annotations

import fcntl
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers

from examples import make_checkpoint as maker
from examples import train_checkpoint as trainer
from tests.support.kv import eventually


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


def test_a_process_that_waits_for_another_ones_training_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(maker, "CACHE", tmp_path)
    made = tmp_path / "made"
    with (tmp_path / "lock").open("w") as lock, ThreadPoolExecutor(1) as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = other.submit(maker.make_checkpoint, made, 1)
        eventually(lambda: "waiting for the process that trains" in capfd.readouterr().err)
        made.mkdir()
        (made / "config.json").touch()
        lock.close()
        assert waiting.result(timeout=60) == made


def test_an_interrupted_training_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        maker.make_checkpoint(tmp_path / "out", steps=1)
    assert not list(tmp_path.iterdir())


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        maker.make_checkpoint(tmp_path, steps=1)
    assert (tmp_path / "notes").read_text() == "mine"
