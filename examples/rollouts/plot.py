"""Draws reports of train.py as an SVG: the reward, and the tokens for each pass of the target, over the steps.

python examples/rollouts/plot.py plot.svg "draft as it was=frozen.json" "distilled=distilled.json"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH = 720
HEIGHT = 240
MARGIN = 48
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def draw(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Two panels, one above the other, with a line for each run."""
    panels = [
        panel(runs, "reward", "reward: share of digits", 0),
        panel(runs, "tokens_per_pass", "tokens for each pass of the target", HEIGHT),
    ]
    legend = [
        text(MARGIN + 10, 2 * HEIGHT + 20 + 18 * place, name, COLOURS[place % len(COLOURS)])
        for place, name in enumerate(runs)
    ]
    height = 2 * HEIGHT + 20 + 18 * len(runs)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    white = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, white, *panels, *legend, "</svg>\n"])


def panel(runs: Mapping[str, Sequence[Mapping[str, float]]], key: str, title: str, top: int) -> str:
    highest = max(record[key] for records in runs.values() for record in records)
    last = max(len(records) for records in runs.values()) - 1
    bottom = top + HEIGHT - MARGIN
    parts = [
        text(MARGIN, top + 20, title),
        text(8, bottom, "0"),
        text(8, top + 40, f"{highest:.2f}"),
        text(WIDTH - MARGIN - 40, bottom + 18, f"step {last}"),
        f'<path d="M{MARGIN} {top + 30} V{bottom} H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
    ]
    for place, records in enumerate(runs.values()):
        points = []
        for step, record in enumerate(records):
            x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(last, 1)
            y = bottom - (HEIGHT - MARGIN - 36) * record[key] / (highest or 1.0)
            points.append(f"{x:.1f},{y:.1f}")
        colour = COLOURS[place % len(COLOURS)]
        # Runs that agree lie on one another: the later ones are thinner, so that all are seen
        width = 5 - 2 * min(place, 2)
        line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        parts.append(line)
    return "\n".join(parts)


def text(x: float, y: float, words: str, colour: str = "black") -> str:
    return f'<text x="{x}" y="{y}" font-size="13" fill="{colour}">{escape(words)}</text>'


if __name__ == "__main__":
    output, *named = sys.argv[1:]
    reports = dict(each.split("=", 1) for each in named)
    Path(output).write_text(
        draw({name: json.loads(Path(path).read_text()) for name, path in reports.items()})
    )
