"""Writes the alerts of deploy/prometheus as an object of the Prometheus Operator.

    python scripts/kubernetes_rules.py

The rules are copied letter by letter, below the lines that make an object of them. A test
compares the written file with them.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "pdstore.rules.yaml"
OBJECT = DEPLOY / "kustomize" / "components" / "alerts" / "rules.yaml"

_HEAD = """\
# scripts/kubernetes_rules.py writes this from deploy/prometheus/pdstore.rules.yaml: change that.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pdstore
spec:
"""


def object_of(rules: str) -> str:
    """Returns the PrometheusRule with the groups of a Prometheus rules file.

    rules: the file's text; comments before its groups are left out.
    """
    groups = rules[rules.index("groups:\n") :]
    return _HEAD + textwrap.indent(groups, "  ")


if __name__ == "__main__":
    OBJECT.write_text(object_of(RULES.read_text()))
    print(f"written: {OBJECT.relative_to(DEPLOY.parent)}")
