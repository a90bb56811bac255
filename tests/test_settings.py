"""Settings: from the environment, by argument, and what is said of a wrong one."""

from __future__ import annotations

import pytest

from pdstore.errors import ConfigError
from pdstore.settings import (
    Settings,
    empty_settings,
    origin_of,
    read_engine_settings,
    read_settings,
    variable_of,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for field in Settings.model_fields:
        monkeypatch.delenv(variable_of(field), raising=False)


def test_variables_are_read_in_their_own_forms_and_the_switch_is_off_without_one(monkeypatch):
    assert not read_settings().pd_transfer_via_storage
    values = {"pd_transfer_via_storage": "1", "staging": "2GiB", "status_port": "8101"}
    for field, value in values.items():
        monkeypatch.setenv(variable_of(field), value)
    settings = read_settings()
    assert [getattr(settings, field) for field in values] == [True, 2 << 30, 8101]


def test_an_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("PDSTORE_STORE", "redis://there")
    assert read_settings().store == "redis://there"
    assert read_settings(store="memory://").store == "memory://"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("PDSTORE_SOTRE", "PDSTORE_STORE"),
        ("PDSTORE_BLOCK_TOKEN", "PDSTORE_BLOCK_TOKENS"),
        ("pdstore_store", "PDSTORE_STORE"),
        ("Pdstore_Sotre", "PDSTORE_STORE"),
        ("PD_TRANSFER_VIA_STORGE", "PD_TRANSFER_VIA_STORAGE"),
        ("PD_TRANSFER_VIA_STORE", "PD_TRANSFER_VIA_STORAGE"),
        ("pd_transfer_via_storage", "PD_TRANSFER_VIA_STORAGE"),
        ("PD_STORE_ROLE", "PDSTORE_ROLE"),
        ("PDSTOR_ROLE", "PDSTORE_ROLE"),
        ("PDSTORESTORE", "PDSTORE_STORE"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_right_name(monkeypatch, name, near):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"unknown setting {name}: did you mean {near}\?"):
        read_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PDSTORE_BLOCK_TOKENS", "0"),
        ("PDSTORE_BLOCK_TOKENS", "many"),
        ("PDSTORE_ROLE", "both_of_them"),
        ("PDSTORE_WORKERS", "1"),
        ("PDSTORE_STAGING", "big"),
        ("PD_TRANSFER_VIA_STORAGE", "perhaps"),
        ("PDSTORE_DRAIN_S", "inf"),
        ("PDSTORE_DRAIN_S", "1e300"),
        ("PDSTORE_DEADLINE_S", "nan"),
    ],
)
def test_a_bad_value_names_its_variable(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}: "):
        read_settings()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("PD_TRANSFER_VIA_STORAGE", "yess", "write 1 or 0"),
        ("PDSTORE_STAGING", "1XB", "write a size like 1GiB"),
        ("PDSTORE_STAGING", "lots", "write a size like 1GiB"),
        ("PDSTORE_DEADLINE_S", "5s", "write a number of seconds"),
        ("PDSTORE_WORKERS", "four", "write a whole number"),
        ("PDSTORE_TRACES", "localhost:4318", "write a URL like http://"),
    ],
)
def test_a_bad_value_comes_with_what_to_write(monkeypatch, name, value, remedy):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}: {remedy}"):
        read_settings()


def test_an_unknown_argument_is_refused():
    with pytest.raises(ConfigError, match="sotre"):
        read_settings(sotre="memory://")


@pytest.mark.parametrize("field", [f for f in Settings.model_fields if f != "seal_key_file"])
def test_empty_is_unset_in_the_environment_and_as_an_argument(monkeypatch, field):
    default = read_settings()
    monkeypatch.setenv(variable_of(field), "")
    settings = read_settings(**{field: ""})
    assert (settings, settings.model_fields_set) == (default, default.model_fields_set)
    assert origin_of(settings, field) == "default"
    assert empty_settings(settings) == f"; empty, so as if not set: {variable_of(field)}"


def test_an_empty_key_file_ends_the_start_and_says_what_to_write(monkeypatch):
    words = (
        "PDSTORE_SEAL_KEY_FILE is empty: write the path of the key file, or leave the setting out"
    )
    with pytest.raises(ConfigError, match=words):
        read_settings(seal_key_file="")
    monkeypatch.setenv("PDSTORE_SEAL_KEY_FILE", "")
    with pytest.raises(ConfigError, match=words):
        read_settings()
    assert str(read_settings(seal_key_file="/a/key").seal_key_file) == "/a/key"


OF_KUBERNETES = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "6379",
    "SERVICE_PORT_HTTP_METRICS": "9000",
    "PORT": "tcp://10.0.0.1:6379",
    "PORT_6379_TCP": "tcp://10.0.0.1:6379",
    "PORT_6379_TCP_PROTO": "tcp",
    "PORT_53_UDP_ADDR": "10.0.0.1",
    "PORT_132_SCTP_PORT": "132",
}
"""Variables that a pod gets for each Service of its namespace, behind the Service's name."""


@pytest.mark.parametrize("read", [read_settings, read_engine_settings])
@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("service", ["PDSTORE", "PDSTORE_REDIS", "PDSTORE_STORE", "PDSTORE_STATUS"])
def test_a_kubernetes_service_called_pdstore_changes_nothing(monkeypatch, service, switch, read):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", switch)
    default = read()
    for name, value in OF_KUBERNETES.items():
        monkeypatch.setenv(f"{service}_{name}", value)
    assert read() == default
    assert read().status_port is None


@pytest.mark.parametrize(
    "name", ["PDSTORE_PORTS", "PDSTORE_SERVICE", "PDSTORE_PORT_X", "PDSTORE_STORE_HOST"]
)
def test_what_kubernetes_does_not_set_is_refused_as_ever(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"unknown setting {name}"):
        read_settings()


@pytest.mark.parametrize("switch", ["", "0", "false", "OFF"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PDSTORE_SOTRE", "x"),
        ("PDSTORE_WORKERS", "none"),
        ("PDSTORE_SEAL_KEY_FILE", ""),
        ("PD_STORE_ROLE", "decode"),
    ],
)
def test_with_the_switch_off_an_engine_starts_whatever_is_set(monkeypatch, name, value, switch):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", switch)
    monkeypatch.setenv(name, value)
    assert not read_engine_settings(role="prefill").pd_transfer_via_storage
    assert read_engine_settings(role="prefill").role == "prefill"
    with pytest.raises(ConfigError, match=name):
        read_engine_settings(pd_transfer_via_storage=True)
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    with pytest.raises(ConfigError, match=name):
        read_engine_settings()
    assert not read_engine_settings(pd_transfer_via_storage=False).pd_transfer_via_storage


@pytest.mark.parametrize(
    "name", ["PD_TRANSFER_VIA_STORGE", "pd_transfer_via_storage", "PDSTORE_TRANSFER_VIA_STORAGE"]
)
def test_a_misspelt_switch_ends_an_engines_start(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    words = rf"unknown setting {name}: did you mean PD_TRANSFER_VIA_STORAGE\?"
    with pytest.raises(ConfigError, match=words):
        read_engine_settings()


def test_a_switch_that_is_neither_on_nor_off_ends_an_engines_start(monkeypatch):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "yess")
    with pytest.raises(ConfigError, match="PD_TRANSFER_VIA_STORAGE=yess: write 1 or 0"):
        read_engine_settings()
