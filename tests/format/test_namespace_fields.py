"""The document of a namespace: every field is there, and no secret is."""

from __future__ import annotations

from pdstore.format.layer_spec import LayerSpec
from pdstore.format.layout import Layout
from pdstore.format.namespace_fields import namespace_fields
from pdstore.settings import read_settings

LAYERS = (LayerSpec(8, 128), LayerSpec(4, 64, kind="sliding", window=1024, table=1))


def fields_of(**settings):
    return namespace_fields(
        Layout("bfloat16", LAYERS, 64, 16, "theta=1"), read_settings(**settings), "weights@1"
    )


def test_layers_are_described_in_their_order():
    fields = fields_of()
    assert fields["layers"] == [["full", 8, 128, 256], ["sliding", 4, 64, 128]]
    assert (fields["windows"], fields["tables"]) == ([None, 1024], [0, 1])


def test_the_salt_is_there_as_a_digest_only():
    assert fields_of()["salt"] is None
    assert "secret" not in str(fields_of(salt="secret"))
    assert fields_of(salt="secret")["salt"] != fields_of(salt="other")["salt"]


def test_what_the_user_sets_is_in_it():
    assert fields_of(hash="xxh3_128")["hash"] == "xxh3_128"
    assert fields_of()["weights"] == "weights@1"


def test_a_seal_is_in_it_but_not_its_key(tmp_path):
    """The key changes in a rotation; without a seal the document is as it always was."""
    sealed = fields_of(seal_key_file=tmp_path / "a")
    assert sealed == fields_of(seal_key_file=tmp_path / "b")
    assert sealed == {**fields_of(), "seal": "aes-256-gcm"}
