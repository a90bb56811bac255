"""Makes the table of docs/settings.md from the settings class."""

from __future__ import annotations

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from pdstore.settings import Settings, variable_of


def settings_table() -> str:
    """Returns a Markdown table: variable, default, meaning."""
    rows = ["| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = _text_of(field.default)
        rows.append(f"| `{variable_of(name)}` | {default} | {field.description} |")
    return "\n".join(rows)


def _text_of(default: object) -> str:
    if default is None or default is PydanticUndefined or isinstance(default, SecretStr):
        return ""
    if isinstance(default, bool):
        return f"`{int(default)}`"
    if hasattr(default, "human_readable"):
        return f"`{default.human_readable().replace('.0', '')}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    print(settings_table())
