"""settings_table: a row for each setting, in Markdown."""

from __future__ import annotations

from pdstore.cli.settings_table import settings_table
from pdstore.settings import Settings, variable_of


def test_each_setting_has_one_row_with_its_meaning():
    rows = settings_table().splitlines()[2:]
    assert len(rows) == len(Settings.model_fields)
    for row, (name, field) in zip(rows, Settings.model_fields.items(), strict=True):
        assert row.startswith(f"| `{variable_of(name)}` | ")
        assert row.endswith(f" | {field.description} |")


def test_defaults_are_shown_as_a_user_would_write_them():
    table = settings_table()
    assert "| `PDSTORE_ROLE` | `both` |" in table
    assert "| `PDSTORE_REQUIRE_STORE` | `0` |" in table
