"""The tiny checkpoint is an ordinary one, the same each time, and there whole or not at all."""

from __future__ import annotations

import fcntl
import subprocess
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


@pytest.mark.nightly
def test_training_again_gives_the_same_bytes(tmp_path):
    paths = [maker.make_checkpoint(tmp_path / name, steps=3) for name in "ab"]
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        first, second = ((path / name).read_bytes() for path in paths)
        assert first == second


def test_it_is_trained_once(tmp_path, monkeypatch):
    path = maker.make_checkpoint(tmp_path / "once", steps=1)
    monkeypatch.delattr(trainer, "train_model")
    assert maker.make_checkpoint(tmp_path / "once", steps=1) == path


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


def test_training_teaches_something(tmp_path):
    documents = maker.documents_of_repository()
    text = documents[0][:1000]
    ids = trainer.train_tokenizer(documents)(text, return_tensors="pt")["input_ids"]
    losses = [
        transformers.AutoModelForCausalLM.from_pretrained(
            maker.make_checkpoint(tmp_path / str(steps), steps=steps)
        )(input_ids=ids, labels=ids).loss.item()
        for steps in (1, 20)
    ]
    assert losses[1] < losses[0] - 0.3


def test_an_interrupted_training_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        maker.make_checkpoint(tmp_path / "out", steps=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_of_two_at_once_one_trains_and_both_have_it(tmp_path):
    command = [sys.executable, "-m", "examples.make_checkpoint", "--steps", "1", "--out"]
    both = [
        subprocess.Popen(
            [*command, str(tmp_path / "out")], stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [out.decode().strip() for out, _ in said] == [str(tmp_path / "out")] * 2
    assert sum(b"training" in progress for _, progress in said) == 1


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        maker.make_checkpoint(tmp_path, steps=1)
    assert (tmp_path / "notes").read_text() == "mine"
