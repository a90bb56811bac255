"""The tables of settings, metrics and reasons in the documents; `python -m tests.docs.tables`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from pdstore.metrics import METRICS, REASONS, Kind
from pdstore.settings import Settings, variable_of
from pdstore.telemetry.reasons import ADVICE


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
    rows = ["| reason | means | look at |", "|---|---|---|"]
    rows += [f"| `{reason.value}` | {a.means} | {a.look_at} |" for reason, a in ADVICE.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table(), metrics_table(), advice_table(), sep="\n\n")
