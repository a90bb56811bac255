"""Whatever a client or a user writes: it is understood, or refused by an error of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import strategies as st

from pdstore.errors import ConfigError
from pdstore.format.handoff import Handoff
from pdstore.format.keys import Namespace, Part
from pdstore.settings import Settings, read_settings, variable_of
from pdstore.store import open_store
from pdstore.store.seal import read_seal_keys
from pdstore.store.url import StoreURL, without_secret
from tests.fuzz.search import attempted, num_examples, search

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.text("0123456789abcdef", min_size=32, max_size=32)
)
FIELDS = st.sampled_from(["attempt", "num_tokens", "namespace", "pool_id", "fields", "other"])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(FIELDS | st.text(max_size=9), inner)
    ),
    max_leaves=12,
)
NAMESPACE = Namespace({"format": 1, "weights": "w", "salt": "s"}, (Part(0, 0),), 64)


@num_examples
def test_kv_transfer_params_are_a_hand_off_or_a_value_error(num_examples: int) -> None:
    def check(said: object) -> None:
        handoff, refusal = attempted(lambda: Handoff.of({"pdstore": said}), ValueError)
        assert not refusal or ("kv_transfer_params.pdstore" in refusal and len(refusal) < 200)
        if handoff is not None:
            assert Handoff.of(handoff.params()) == handoff
            lines = NAMESPACE.differences(handoff.fields)
            assert all(line.isprintable() and len(line) < 400 for line in lines)
            json.dumps(handoff.params(), allow_nan=False)

    search(num_examples, check, said=JSON | st.dictionaries(FIELDS, JSON))


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
SCHEMES = ["redis", "rediss", "redis+unix", "memory", "mooncake", "http", "faulty+memory", ""]
PARTS = TEXTS | st.text("/?#@:%&=[]0123456789.", max_size=12)
URLS = st.builds("{}://{}{}".format, st.sampled_from(SCHEMES), PARTS, PARTS) | PARTS


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """No package has a store of its own: to look for them takes longer than an example."""
    monkeypatch.setattr("pdstore.store.connect.entry_points", lambda group: ())
    return read_settings(store="memory://")


@num_examples
def test_a_store_url_opens_or_is_a_config_error(num_examples: int, settings: Settings) -> None:
    """Only schemes that make no file; the others share the parser."""

    def check(url: str) -> None:
        store, _ = attempted(lambda: open_store(url, settings), ConfigError)
        if store is not None:
            store.close()

    check("mooncake://\x80")
    search(num_examples, check, url=URLS)


@num_examples
def test_no_message_about_a_url_shows_its_password(num_examples: int, settings: Settings) -> None:
    def check(scheme: str, before: str, after: str) -> None:
        url = f"{scheme}://u:{before}hushhush{after}@host:1/{after}"
        parsed, refusal = attempted(lambda: StoreURL.of(url), ConfigError)
        said = [without_secret(url), refusal]
        said += [parsed.label, repr(parsed)] if parsed is not None else []
        store, refusal = attempted(lambda: open_store(url, settings), ConfigError)
        said += [refusal, repr(store), store.label if store is not None else ""]
        assert not any("hushhush" in text for text in said)

    words = st.text("/?#@:%[]a1", max_size=5)
    schemes = st.sampled_from(["redis", "rediss", "redis+unix", "mooncake", "http", "Re dis"])
    search(num_examples, check, scheme=schemes, before=words, after=words)


@num_examples
def test_a_setting_is_taken_or_is_a_config_error_with_its_name(
    num_examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    likely = st.sampled_from(["", "0", "1", "-1", "nan", "inf", "1e400", "1GiB", "9" * 400, "auto"])

    shown_in_any_case = repr(read_settings(salt="a salt"))

    def check(field: str, text: str) -> None:
        variable = variable_of(field)
        with monkeypatch.context() as environment:
            environment.setenv(variable, text)
            settings, refusal = attempted(read_settings, ConfigError)
        assert settings is not None or (variable in refusal and len(refusal) < 4000)
        if field in ("salt", "store") and text not in shown_in_any_case:
            assert text not in repr(settings)

    fields = st.sampled_from(list(Settings.model_fields))
    search(num_examples, check, field=fields, text=TEXTS | likely)


@num_examples
def test_a_key_file_has_keys_or_is_a_config_error(num_examples: int, tmp_path: Path) -> None:
    path = tmp_path / "seal.key"
    path.touch(0o600)
    line = st.binary(max_size=70) | st.text("0123456789abcdefABCDEF", max_size=66).map(str.encode)

    def check(lines: list[bytes]) -> None:
        path.write_bytes(b"\n".join(lines))
        keys, refusal = attempted(lambda: read_seal_keys(path), ConfigError)
        assert len(refusal) < 400
        assert keys is None or ({len(key) for key in keys} == {32} and len(keys) <= 2)

    search(num_examples, check, lines=st.lists(line, max_size=4))
