"""Prints what the chart makes of its defaults, for those who use kustomize and not Helm.

python deploy/kustomize/render.py > deploy/kustomize/base/kvboost.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[1] / "helm" / "kvboost"
HELM_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")
HEAD = "# Made by deploy/kustomize/render.py from the Helm chart; do not edit it by hand.\n"


def render_base() -> str:
    """The objects of the chart's defaults as YAML, without Helm's labels, and without the Secret, which is yours."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render({"secrets": {"existingSecret": "kvboost"}}, name="kvboost")
    documents = [yaml.safe_load(text) for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return HEAD + yaml.safe_dump_all([_without_helm(d) for d in documents if d], sort_keys=False, width=120)


def _without_helm(document: dict[str, Any]) -> dict[str, Any]:
    for label in HELM_LABELS:
        document["metadata"]["labels"].pop(label, None)
    return document


if __name__ == "__main__":
    sys.stdout.write(render_base())
