"""The tiny checkpoint is an ordinary one, the same each time, and there whole or not at all."""

from __future__ import annotations

import sys

import pytest

transformers = pytest.importorskip("transformers")

from examples import make_checkpoint as maker  # noqa: E402


@pytest.fixture(autouse=True)
def documents(monkeypatch):
    """As they are now: a file may be edited during a test."""
    texts = maker._documents()
    monkeypatch.setattr(maker, "_documents", lambda: texts)


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


def test_training_again_gives_the_same_bytes(tmp_path):
    paths = [maker.make_checkpoint(tmp_path / name, steps=3) for name in "ab"]
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        first, second = ((path / name).read_bytes() for path in paths)
        assert first == second


def test_it_is_trained_once(tmp_path, monkeypatch):
    path = maker.make_checkpoint(tmp_path / "once", steps=1)
    monkeypatch.delattr(maker, "_train_model")
    assert maker.make_checkpoint(tmp_path / "once", steps=1) == path


def test_training_teaches_something(tmp_path):
    text = maker._documents()[0][:1000]
    ids = maker.train_tokenizer(maker._documents())(text, return_tensors="pt")["input_ids"]
    losses = [
        transformers.AutoModelForCausalLM.from_pretrained(
            maker.make_checkpoint(tmp_path / str(steps), steps=steps)
        )(input_ids=ids, labels=ids).loss.item()
        for steps in (1, 40)
    ]
    assert losses[1] < losses[0] - 0.3


def test_an_interrupted_training_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(maker, "_train_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        maker.make_checkpoint(tmp_path / "out", steps=1)
    assert not list(tmp_path.iterdir())


def test_the_first_of_two_at_once_wins(tmp_path, monkeypatch):
    train = maker._train_model

    def overtaken(*arguments):
        monkeypatch.setattr(maker, "_train_model", train)
        maker.make_checkpoint(tmp_path / "out", steps=1)
        return train(*arguments)

    monkeypatch.setattr(maker, "_train_model", overtaken)
    assert maker.make_checkpoint(tmp_path / "out", steps=1) == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        maker.make_checkpoint(tmp_path, steps=1)
    assert (tmp_path / "notes").read_text() == "mine"
