"""Every name of a setting is read as its users write it."""

from __future__ import annotations

import pytest

from pdstore.store.mooncake.names import NAMES, UNUSED_KEYS, UNUSED_VARIABLES, parse_size


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (7, 7),
        (1.5e9, 1_500_000_000),
        ("7", 7),
        ("7b", 7),
        ("2k", 2 << 10),
        ("512 MiB", 512 << 20),
        ("4gb", 4 << 30),
        (" 1.5G ", 3 << 29),
        ("1TB", 1 << 40),
    ],
)
def test_a_size_is_bytes_or_has_a_unit_of_1024(value, num_bytes):
    assert parse_size(value) == num_bytes


@pytest.mark.parametrize("value", ["", "4 apples", "-1", True, None, "gb"])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ValueError, match="like 4GB"):
        parse_size(value)


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("topology", "Shared", "shared"),
        ("mode", "standalone-store", "holder"),
        ("protocol", "RDMA", "rdma"),
        ("ssd", "yes", True),
        ("ssd", 0, False),
        ("lease_s", "2.5", 2.5),
        ("http_port", 9300, 9300),
        ("devices", "auto-discovery", ""),
        ("devices", ["mlx5_0", "mlx5_1", "mlx5_0"], "mlx5_0,mlx5_1"),
        ("devices", '{"0": "mlx5_0", "1": "mlx5_1"}', "mlx5_0,mlx5_1"),
    ],
)
def test_a_value_is_read(name, value, parsed):
    assert NAMES[name].parse(value) == parsed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topology", "ring"),
        ("mode", "other"),
        ("ssd", "perhaps"),
        ("lease_s", "0"),
        ("lease_s", "soon"),
        ("http_port", "70000"),
        ("master", True),
    ],
)
def test_a_bad_value_is_refused(name, value):
    with pytest.raises(ValueError):
        NAMES[name].parse(value)


def test_no_name_means_two_settings():
    for kind in ("options", "keys", "variables"):
        every = [name for names in NAMES.values() for name in getattr(names, kind)]
        every += {"keys": UNUSED_KEYS, "variables": UNUSED_VARIABLES}.get(kind, ())
        assert len(every) == len(set(every))
