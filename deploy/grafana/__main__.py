"""Write deploy/grafana/dashboards/: what Grafana shows, from the short descriptions in panels.py and vllm_panels.py.

python -m deploy.grafana           write it
python -m deploy.grafana --check   exit 1 when a file differs from its description
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.panels import SECTIONS
from deploy.grafana.parts import Panel, Section
from deploy.grafana.vllm_panels import VLLM_SECTIONS

DASHBOARD = Path(__file__).parent / "dashboards" / "tandem.json"
VLLM_DASHBOARD = DASHBOARD.with_name("vllm.json")

_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return _shell() | {"panels": _laid_out(SECTIONS)}


def vllm_dashboard() -> dict[str, Any]:
    """The one of a vLLM that drafts from our services."""
    shell = _shell()
    source, _ = shell["templating"]["list"]
    own = {
        "uid": "tandem-vllm",
        "title": "Tandem with vLLM",
        "description": "Whether Tandem's drafts help a vLLM, and what to look at when they do not.",
        "templating": {"list": [source]},
    }
    return shell | own | {"panels": _laid_out(VLLM_SECTIONS)}


def _laid_out(sections: list[Section]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for section in sections:
        panels.append(
            _at({"type": "row", "title": section.title, "panels": []}, len(panels), 0, top, _COLUMNS, 1)
        )
        top += 1
        left = height = 0
        for panel in section.panels:
            if left + panel.width > _COLUMNS:
                left, top, height = 0, top + height, 0
            panels.append(_at(_panel(panel), len(panels), left, top, panel.width, panel.height))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return panels


def _at(panel: dict[str, Any], index: int, left: int, top: int, width: int, height: int) -> dict[str, Any]:
    return {"id": index + 1, "gridPos": {"x": left, "y": top, "w": width, "h": height}, **panel}


def _panel(panel: Panel) -> dict[str, Any]:
    is_instant = panel.kind in ("stat", "bargauge")
    targets = [
        {
            "refId": chr(ord("A") + number),
            "expr": query.expression,
            "legendFormat": query.legend,
            "instant": is_instant,
            "range": not is_instant,
            "datasource": _SOURCE,
        }
        for number, query in enumerate(panel.queries)
    ]
    defaults, options = _look(panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _scale(panel) | defaults, "overrides": []},
        "options": options,
    }


def _scale(panel: Panel) -> dict[str, Any]:
    ends = {} if panel.top is None else {"min": 0, "max": panel.top}
    return {"unit": panel.unit, "color": {"mode": "palette-classic"}, "noValue": "-", **ends}


def _look(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Field defaults and options of one kind of panel."""
    last = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    by_value = {"color": {"mode": "thresholds"}, "thresholds": _thresholds(panel.steps)}
    match panel.kind:
        case "timeseries":
            custom = {"lineWidth": 2, "fillOpacity": 30 if panel.stacked else 8, "showPoints": "never"}
            stacking = {"stacking": {"mode": "normal"}} if panel.stacked else {}
            legend = {"placement": "bottom", "displayMode": "list", "showLegend": True}
            return {"custom": custom | stacking}, {"legend": legend, "tooltip": {"mode": "multi"}}
        case "stat":
            return by_value, {"graphMode": "none", "colorMode": "value", **last}
        case "bargauge":
            return {"color": {"mode": "continuous-BlPu"}}, {
                "orientation": "vertical",
                "displayMode": "basic",
                **last,
            }
        case "state-timeline":
            words = {"0": {"text": "not ready"}, "1": {"text": "ready"}}
            mappings = {"mappings": [{"type": "value", "options": words}]}
            return by_value | mappings, {"showValue": "never", "legend": {"showLegend": False}}


def _thresholds(steps: dict[float, str]) -> dict[str, Any]:
    """A colour from each value on; the first has no lower end."""
    values = [
        {"value": value if number else None, "color": colour}
        for number, (value, colour) in enumerate(steps.items())
    ]
    return {"mode": "absolute", "steps": values or [{"value": None, "color": "text"}]}


def _shell() -> dict[str, Any]:
    return {
        "uid": "tandem",
        "title": "Tandem",
        "description": "Whether speculation pays, and what to look at when it does not.",
        "tags": ["tandem", "llm"],
        "schemaVersion": 41,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(tandem_requests_total, model_name)",
                    "definition": "label_values(tandem_requests_total, model_name)",
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
    }


def main() -> None:
    """Write the files, or check them."""
    for file, made in ((DASHBOARD, dashboard()), (VLLM_DASHBOARD, vllm_dashboard())):
        text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
        if "--check" not in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {file} is not what its panels say; run python -m deploy.grafana")


if __name__ == "__main__":
    main()
