"""The dashboard's panels, and their queries as Grafana sends them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json"
VLLM_DASHBOARD = DASHBOARD.with_name("vllm.json")


@dataclass(frozen=True, slots=True)
class Query:
    panel: str
    expression: str
    legend: str


def panels(dashboard: Path = DASHBOARD) -> list[dict[str, Any]]:
    """All panels without the titles of rows, which have no queries."""
    found = json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def filled(expression: str) -> str:
    """The query for all models, over a minute."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


def queries(dashboard: Path = DASHBOARD) -> list[Query]:
    return [
        Query(panel["title"], filled(target["expr"]), target["legendFormat"])
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
