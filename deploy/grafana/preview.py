"""Draw the dashboard without Grafana: an SVG of its panels with the data that a Prometheus gave for their queries.

    python -m deploy.grafana.preview panels.json > dashboard.svg

It shows the results of the queries and whether the panels are readable, not how Grafana draws them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

_CELL_WIDTH, _CELL_HEIGHT, _GAP, _LEFT = 52, 30, 8, 46
_COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#37872d", "#806eb7", "#b877d9")
_SIZES = {"s": ((1e-3, "µs", 1e6), (1.0, "ms", 1e3), (math.inf, "s", 1.0))}

Point = tuple[float, float]
Line = tuple[str, list[Point]]


def words(value: float, unit: str) -> str:
    """A value as Grafana writes it, about."""
    match unit:
        case "percentunit":
            return f"{value:.1%}"
        case "s":
            name, factor = next((name, factor) for below, name, factor in _SIZES["s"] if abs(value) < below)
            return f"{value * factor:.3g} {name}"
        case "bytes":
            return f"{value / 1024:.3g} KiB" if value >= 1024 else f"{value:.3g} B"
        case "x":
            return f"{value:.2f} x"
    return f"{value:.3g}"


def lines_of(panel: dict[str, Any]) -> list[Line]:
    """Each series of a panel's queries, with its name."""
    found = []
    for target in panel["targets"]:
        for series in target["answer"]:
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = series.get("values") or [series["value"]]
            numbers = [(float(when), float(value)) for when, value in points]
            found.append((name, [point for point in numbers if math.isfinite(point[1])]))
    return [line for line in found if line[1]]


def _text(
    x: float, y: float, words: str, size: int = 11, fill: str = "#52545c", anchor: str = "start"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def _rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _stat(panel: dict[str, Any], lines: list[Line], box: Sequence[float]) -> Iterator[str]:
    x, y, width, height = box
    value = lines[0][1][-1][1]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    fill = {"green": "#37872d", "orange": "#e0752d", "red": "#c4162a"}.get(colour, "#24292e")
    shown = words(value, panel["fieldConfig"]["defaults"]["unit"])
    yield _text(x + width / 2, y + height / 2 + 20, shown, 28, fill, "middle")


def _bars(panel: dict[str, Any], lines: list[Line], box: Sequence[float]) -> Iterator[str]:
    x, y, width, height = box
    lines = sorted(lines, key=lambda line: line[0])
    step = width / len(lines)
    for number, (name, points) in enumerate(lines):
        value = points[-1][1]
        tall = (height - 70) * min(value, 1.0)
        left, base = x + number * step, y + height - 24
        yield _rectangle(left + step * 0.2, base - tall, step * 0.6, tall, "#3274d9")
        yield _text(left + step / 2, base - tall - 4, words(value, "percentunit"), 11, "#24292e", "middle")
        yield _text(left + step / 2, base + 15, name, 11, anchor="middle")


def _states(lines: list[Line], box: Sequence[float]) -> Iterator[str]:
    x, y, width, height = box
    start, end = min(line[1][0][0] for line in lines), max(line[1][-1][0] for line in lines)
    tall = min(22.0, (height - 50) / len(lines))
    for number, (name, points) in enumerate(sorted(lines)):
        top = y + 34 + number * tall
        yield _text(x + 8, top + tall * 0.65, name, 10)
        for (when, value), (until, _) in zip(points, [*points[1:], (end, 0)], strict=True):
            left = x + 150 + (width - 160) * (when - start) / max(end - start, 1)
            right = x + 150 + (width - 160) * (until - start) / max(end - start, 1)
            fill = "#37872d" if value else "#c4162a"
            yield _rectangle(left, top, right - left + 0.3, tall - 5, fill)


def _stacked(lines: list[Line]) -> list[Line]:
    below: dict[float, float] = {}
    found = []
    for name, points in lines:
        raised = [(when, value + below.get(when, 0.0)) for when, value in points]
        below |= dict(raised)
        found.append((name, raised))
    return found[::-1]


def _series(panel: dict[str, Any], lines: list[Line], box: Sequence[float]) -> Iterator[str]:
    x, y, width, height = box
    defaults = panel["fieldConfig"]["defaults"]
    names = [name for name, _ in lines]
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    is_stacked = "stacking" in defaults.get("custom", {})
    lines = _stacked(lines) if is_stacked else lines
    top = defaults.get("max") or max(value for _, points in lines for _, value in points) * 1.1 or 1.0
    start, end = min(line[1][0][0] for line in lines), max(line[1][-1][0] for line in lines)
    legend = list(_legend(names, width - _LEFT - 12))
    rows = max((row for _, row, _ in legend), default=0)
    left, right, base, roof = x + _LEFT + 12, x + width - 10, y + height - 40 - 14 * rows, y + 34

    def place(point: Point) -> str:
        across = left + (right - left) * (point[0] - start) / max(end - start, 1)
        return f"{across:.1f},{base - (base - roof) * max(0.0, min(point[1] / top, 1.0)):.1f}"

    for part in (0, 0.5, 1):
        height_of = base - (base - roof) * part
        yield f'<line x1="{left}" y1="{height_of}" x2="{right}" y2="{height_of}" stroke="#e3e4e8"/>'
        yield _text(left - 5, height_of + 4, words(top * part, defaults["unit"]), 10, anchor="end")
    for name, points in lines:
        path = " ".join(place(point) for point in points)
        if is_stacked:
            foot = f"{place((points[-1][0], 0))} {place((points[0][0], 0))}"
            yield f'<polygon points="{path} {foot}" fill="{colours[name]}"/>'
        yield f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="1.6"/>'
    for name, row, across in legend:
        line = y + height - 16 - 14 * (rows - row)
        yield _rectangle(left + across, line - 6, 10, 4, colours[name])
        yield _text(left + across + 14, line, name, 10)


def _legend(names: Sequence[str], width: float) -> Iterator[tuple[str, int, float]]:
    """Each name, the row of the legend that it stands in, and how far to the right."""
    row, across = 0, 0.0
    for name in names:
        wide = 26 + 5.8 * len(name)
        if across and across + wide > width:
            row, across = row + 1, 0.0
        yield name, row, across
        across += wide


def _panel(panel: dict[str, Any], box: Sequence[float]) -> Iterator[str]:
    x, y, width, height = box
    if panel["type"] == "row":
        yield _text(x + 2, y + 17, panel["title"], 14, "#24292e")
        return
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="#fff" stroke="#d8d9df"/>'
    yield _text(x + 10, y + 20, panel["title"], 12, "#24292e")
    lines = lines_of(panel)
    if not lines:
        yield _text(x + width / 2, y + height / 2, "no data", 13, "#c4162a", "middle")
    elif panel["type"] == "stat":
        yield from _stat(panel, lines, box)
    elif panel["type"] == "bargauge":
        yield from _bars(panel, lines, box)
    elif panel["type"] == "state-timeline":
        yield from _states(lines, box)
    else:
        yield from _series(panel, lines, box)


def drawing(panels: list[dict[str, Any]]) -> str:
    """The whole dashboard as SVG; each target of a panel has its `answer`, as Prometheus gives results."""
    boxes = [panel["gridPos"] for panel in panels]
    width = 24 * _CELL_WIDTH + _GAP
    height = max(box["y"] + box["h"] for box in boxes) * _CELL_HEIGHT + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Inter, Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
    ]
    for panel, grid in zip(panels, boxes, strict=True):
        box = (
            grid["x"] * _CELL_WIDTH + _GAP,
            grid["y"] * _CELL_HEIGHT + _GAP,
            grid["w"] * _CELL_WIDTH - _GAP,
            grid["h"] * _CELL_HEIGHT - _GAP,
        )
        parts += _panel(panel, box)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(drawing(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
