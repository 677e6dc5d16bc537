"""A report as one picture: tokens per second of each contender, a panel for each batch and temperature."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from benchmarks.reports.report import Cell, Report

_WIDTH = 760
_LEFT, _RIGHT = 240, 120
_BAR, _GAP = 16, 6
_PANEL_TOP, _PANEL_GAP = 34, 14
_TOP = 52

_OURS = "#0f766e"
_OTHERS = "#94a3b8"
_INK, _PALE = "#0f172a", "#64748b"


def svg(
    report: Report, ours: frozenset[str] = frozenset({"target-alone", "speculative", "one-process"})
) -> str:
    """The chart as an SVG document, with a white ground so that it reads on dark pages, too."""
    body: list[str] = []
    height = _TOP
    for batch, temperature in dict.fromkeys((cell.batch, cell.temperature) for cell in report.cells):
        found = (report.cell(name, batch, temperature) for name in report.titles)
        cells = [cell for cell in found if cell is not None]
        body += _panel(report, cells, ours, height)
        height += _PANEL_TOP + len(cells) * (_BAR + _GAP) + _PANEL_GAP
    title = f"Tokens per second, {report.pair.name} pair, {report.dtype}, K = {report.num_speculative_tokens}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="system-ui, sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            _text(16, 28, title, size=15, weight=600),
            *body,
            "</svg>",
            "",
        ]
    )


def _panel(report: Report, cells: list[Cell], ours: frozenset[str], top: int) -> Iterator[str]:
    first = cells[0]
    yield _text(16, top + 18, f"batch {first.batch}, temperature {first.temperature:g}", weight=600)
    most = max(cell.speed.high for cell in cells)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    for index, cell in enumerate(cells):
        y = top + _PANEL_TOP + index * (_BAR + _GAP)
        speed = cell.speed
        colour = _OURS if cell.contender in ours else _OTHERS
        yield _text(_LEFT - 8, y + 12, report.titles[cell.contender], anchor="end")
        yield f'<rect x="{_LEFT}" y="{y}" width="{speed.median * scale:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>'
        low, high = _LEFT + speed.low * scale, _LEFT + speed.high * scale
        middle = y + _BAR / 2
        yield (
            f'<path d="M{low:.1f} {middle} H{high:.1f} M{low:.1f} {middle - 4} v8 M{high:.1f} {middle - 4} v8" '
            f'stroke="{_INK}" stroke-width="1" fill="none"/>'
        )
        yield _text(high + 6, y + 12, f"{speed.median:.0f}", colour=_PALE)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    colour: str = _INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(words)}</text>'
    )
