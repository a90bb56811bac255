"""The tables of settings, metrics and reasons; `python -m tests.docs.tables` updates docs/."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from pdstore.errors import Reason
from pdstore.metrics import METRICS, REASONS, Kind
from pdstore.settings import Settings, variable_of
from pdstore.telemetry.reasons import ADVICE
from tests.docs.commands import ROOT


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


def metrics_table() -> str:
    """Returns the Markdown table of the metrics."""
    rows = ["| metric | labels | |", "|---|---|---|"]
    for metric in METRICS.values():
        text = metric.text if metric.kind is not Kind.HISTOGRAM else f"histogram: {metric.text}"
        labels = ", ".join(_label(name, values) for name, values in metric.labels.items())
        rows.append(f"| `{metric.shown_name}` | {labels} | {text} |")
    return "\n".join(rows)


def _label(name: str, values: Sequence[str]) -> str:
    if not values or values == REASONS:
        return f"`{name}`"
    if values == ("ok", *REASONS):
        return f"`{name}` (`ok` or a reason)"
    return f"`{name}` ({', '.join(f'`{value}`' for value in values)})"


def advice_table() -> str:
    """Returns the Markdown table of the reasons."""
    rows = ["| reason | severity | means |", "|---|---|---|"]
    for reason in Reason:
        advice, severity = ADVICE[reason], reason.severity.value
        link = f"[`{reason.value}`](runbook.md#{reason.value})"
        rows.append(f"| {link} | {severity} | {advice.means} |")
    return "\n".join(rows)


TABLES = (
    ("settings.md", settings_table),
    ("metrics.md", metrics_table),
    ("metrics.md", advice_table),
)


def with_table(text: str, table: str) -> str:
    """Returns a page's text with `table` in place of the table that has the same head."""
    title = table.splitlines()[0]
    before, head, rest = text.partition(f"{title}\n")
    if not head:
        raise ValueError(f"the page has no table with this head: {title}")
    _, _, after = rest.partition("\n\n")
    return f"{before}{table}\n\n{after}".rstrip() + "\n"


if __name__ == "__main__":
    for name, table_of in TABLES:
        page = ROOT / "docs" / name
        page.write_text(with_table(page.read_text(), table_of()))
