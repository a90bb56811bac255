"""Settings: from the environment, by argument, and what is said of a wrong one."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from pdstore.errors import ConfigError
from pdstore.settings import (
    Settings,
    empty_settings,
    origin_of,
    parse_size,
    read_engine_settings,
    read_settings,
    setting_warnings,
    variable_of,
)
from pdstore.store import StoreURL


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


@pytest.mark.misconfiguration("a misspelt `PDSTORE_` name, or a misspelt switch")
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
        ("PD_STORE", "PDSTORE_STORE"),
        ("PD_ROLE", "PDSTORE_ROLE"),
        ("PDSTORE_STAUS_PORT", "PDSTORE_STATUS_PORT"),
        ("PDSTORE_PORT", "PDSTORE_STATUS_PORT"),
        ("PDSTORE_METRICS_PORT", "PDSTORE_STATUS_PORT"),
        ("PDSTORE_URL", "PDSTORE_STORE"),
        ("PDSTORE_POOL", "PDSTORE_STORE"),
        ("PDSTORE_BACKEND", "PDSTORE_STORE"),
        ("PDSTORE_REDIS_URL", "PDSTORE_STORE"),
        ("PDSTORE_DIRECTORY", "PDSTORE_STORE"),
        ("PDSTORE_TIMEOUT", "PDSTORE_DEADLINE_S"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_right_name(monkeypatch, name, near):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"unknown setting {name}: did you mean {near}\?"):
        read_settings()


@pytest.mark.parametrize("name", ["PDSTORE_LOG_LEVEL", "PDSTORE_DEBUG"])
def test_a_level_of_logging_is_told_to_be_the_engines(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}: pdstore logs at the engine's level"):
        read_settings()


@pytest.mark.parametrize("name", ["PDSTORE_COLOUR", "PDSTORE_X", "PDSTORE_"])
def test_a_name_that_is_near_no_setting_gets_no_wrong_hint(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    words = f"unknown setting {name}: docs/settings.md lists them all"
    with pytest.raises(ConfigError, match=words):
        read_settings()


@pytest.mark.parametrize("name", ["PD_STORES_OF_OTHERS", "PD_DISAGG_ROLE", "PDM_HOME", "PDF_STORE"])
def test_variables_of_other_programs_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert read_settings() == Settings()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(
            ("4096", 4096),
            ("1GiB", 1 << 30),
            ("1gib", 1 << 30),
            ("64Gi", 64 << 30),
            ("2GB", 2 * 10**9),
        ),
        *(("1.5 MiB", 3 << 19), (" 20 GiB ", 20 << 30), ("1.5 kB", 1500), ("7b", 7), (7, 7)),
    ],
)
def test_a_size_is_read_whole(text, num_bytes):
    assert parse_size(text) == num_bytes


NO_SIZES = ["1,5GiB", "80%", "1e-3", "1e9", "64GiB/2", "64 GiB x", "16GiB,", "-1", "+1", "1.5", "i"]
NO_SIZES += ["1 2", "1GiB1", "GiB", "1ib", "1Gbit", "0x10", "1_0", "\u0661", "9" * 40, "99999999PB"]
"""Each of them was, or could be, read up to its first odd character."""


@pytest.mark.parametrize("text", [*NO_SIZES, True, None, -5, 0.5, float("nan"), float("inf")])
def test_a_size_with_anything_else_in_it_is_refused(text):
    with pytest.raises(ValueError, match="write a size like 1GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", NO_SIZES)
def test_staging_and_the_options_of_urls_read_sizes_alike(monkeypatch, text):
    monkeypatch.setenv("PDSTORE_STAGING", text)
    with pytest.raises(ConfigError, match=r"PDSTORE_STAGING=.*write a size like 1GiB"):
        read_settings()
    with pytest.raises(ConfigError, match=r"budget=.* is no size; write one like 20GiB"):
        StoreURL.of(f"memory://?{urlencode({'budget': text})}").size("budget", 1)


@pytest.mark.parametrize("name", ["PDSTORE_BLOCK_TTL_S", "PDSTORE_HANDOFF_TTL_S"])
@pytest.mark.parametrize("value", ["9300000000", "1" + "0" * 25])
def test_a_life_that_no_store_can_count_ends_the_start(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}: .*less than or equal to"):
        read_settings()


@pytest.mark.misconfiguration("milliseconds for seconds, as `PDSTORE_HANDOFF_WAIT_S=10000`")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("handoff_wait_s", 10_000, "PDSTORE_HANDOFF_WAIT_S=10000 is 2.78 hours"),
        ("deadline_s", 5000, "PDSTORE_DEADLINE_S=5000 is 83.3 minutes"),
        ("drain_s", 5000, "PDSTORE_DRAIN_S=5000 is 83.3 minutes"),
        ("block_ttl_s", 3_600_000, "PDSTORE_BLOCK_TTL_S=3.6e+06 is 41.7 days"),
    ],
)
def test_milliseconds_for_seconds_are_told_with_what_to_write(field, value, words):
    [(said, remedy)] = setting_warnings(Settings(**{field: value}), None)
    assert said == f"{words}: it is in seconds"
    assert remedy.startswith(f"if milliseconds were meant, write {value / 1000:g}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PDSTORE_STORE", r'PDSTORE_STORE: there is no such setting; write "store"$'),
        ("stor", r'stor: there is no such setting; write "store"$'),
        ("redis_url", r'redis_url: there is no such setting; write "store"$'),
        ("PDSTORE_ROLE", r'PDSTORE_ROLE: there is no such setting; write "role"$'),
        ("colour", r"colour: there is no such setting, see docs/settings.md$"),
    ],
)
def test_an_argument_that_is_spelt_as_a_variable_or_misspelt_says_what_to_write(name, words):
    with pytest.raises(ConfigError, match=words):
        read_settings(**{name: "prefill"})


@pytest.mark.misconfiguration("a value that does not fit, as no workers or another role")
@pytest.mark.requirement("R-AW-5, R22", "threads and queues have bounds")
@pytest.mark.requirement("R-X-1, 6", "settings that cannot be used fail the start")
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


@pytest.mark.misconfiguration("a malformed value, as `1XB`, `yess` or `5s`")
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


@pytest.mark.misconfiguration("`PDSTORE_ROLE=`, empty")
@pytest.mark.misconfiguration("`PDSTORE_WEIGHTS=`, empty")
@pytest.mark.parametrize("field", [f for f in Settings.model_fields if f != "seal_key_file"])
def test_empty_is_unset_in_the_environment_and_as_an_argument(monkeypatch, field):
    default = read_settings()
    monkeypatch.setenv(variable_of(field), "")
    settings = read_settings(**{field: ""})
    assert (settings, settings.model_fields_set) == (default, default.model_fields_set)
    assert origin_of(settings, field) == "default"
    assert empty_settings(settings) == f"; empty, so as if not set: {variable_of(field)}"


@pytest.mark.misconfiguration("`PDSTORE_SEAL_KEY_FILE=`, empty")
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


@pytest.mark.misconfiguration("a Kubernetes Service called `pdstore` or `pdstore-*`")
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
    "name",
    [
        "PDSTORE_PORTS",
        "PDSTORE_SERVICE",
        "PDSTORE_PORT_X",
        "PDSTORE_STORE_HOST",
        "PDSTORE_API_PORT",
    ],
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


@pytest.mark.misconfiguration("`PDSTORE_*` is set, and the switch is missing")
@pytest.mark.parametrize(("switch", "level"), [(None, "WARNING"), ("", "WARNING"), ("0", "INFO")])
def test_settings_without_the_switch_are_told_once(monkeypatch, caplog, switch, level):
    caplog.set_level("INFO")
    monkeypatch.setenv("PDSTORE_ROLE", "decode")
    monkeypatch.setenv("PDSTORE_SALT", "hush")
    if switch is not None:
        monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", switch)
    read_engine_settings()
    [line] = caplog.records
    assert line.levelname == level
    assert "whatever PDSTORE_ROLE, PDSTORE_SALT say: set PD_TRANSFER_VIA_STORAGE=1" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.misconfiguration("a setting with the switch's prefix, as `PD_STORE`")
def test_without_the_switch_a_setting_prefixed_as_the_switch_is_told_too(monkeypatch, caplog):
    monkeypatch.setenv("PD_STORE", "redis://h")
    read_engine_settings()
    assert "whatever PD_STORE says: set PD_TRANSFER_VIA_STORAGE=1" in caplog.text
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    with pytest.raises(ConfigError, match=r"PD_STORE: did you mean PDSTORE_STORE\?"):
        read_engine_settings()


def test_without_the_switch_and_without_settings_there_is_no_line(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("STORE", "of another program")
    monkeypatch.setenv("PD_API_KEY", "of another program")
    monkeypatch.setenv("PDSTORE_SALT", "")
    monkeypatch.setenv("PDSTORE_STATUS_PORT", "tcp://10.0.0.1:80")
    read_engine_settings()
    assert not caplog.records


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
