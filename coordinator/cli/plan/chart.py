"""The chart of `tandem plan`: speed-up by proposal length, a line for each batch."""

from __future__ import annotations

from xml.sax.saxutils import escape

from coordinator.speculation.plan import BatchPlan

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 220, 40, 44
_COLOURS = ("#0f766e", "#b45309", "#1d4ed8", "#9d174d", "#4d7c0f", "#475569")


def svg(plans: dict[str, BatchPlan]) -> str:
    """The chart as an SVG document, on a white background so that it is readable on dark pages too."""
    longest = max(len(found.rows) for found in plans.values()) - 1
    maximum = max(1.2, *(row.speedup for found in plans.values() for row in found.rows)) * 1.05

    def x(tokens: float) -> float:
        return _LEFT + tokens / max(longest, 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(speedup: float) -> float:
        return _HEIGHT - _BOTTOM - speedup / maximum * (_HEIGHT - _TOP - _BOTTOM)

    def line(index: int, name: str, found: BatchPlan) -> list[str]:
        colour, top = _COLOURS[index % len(_COLOURS)], _TOP + 18 * index
        points = " ".join(f"{x(row.tokens):.1f},{y(row.speedup):.1f}" for row in found.rows)
        label = f"{name}: {found.best_speedup:.2f}x at K = {found.best_tokens}"
        best = f'cx="{x(found.best_tokens):.1f}" cy="{y(found.best_speedup):.1f}"'
        return [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<circle {best} r="4" fill="{colour}"/>',
            f'<rect x="{_WIDTH - _RIGHT + 10}" y="{top - 9}" width="10" height="10" fill="{colour}"/>',
            _text(_WIDTH - _RIGHT + 26, top, label, "start"),
        ]

    axes = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(1.0):.1f}" y2="{y(1.0):.1f}" stroke="#64748b" '
        'stroke-dasharray="4 4"/>',
        _text(_LEFT - 8, y(1.0) + 4, "1.0x", "end"),
        _text(_LEFT - 8, y(0.0) + 4, "0", "end"),
        *(_text(x(tokens), _HEIGHT - 22, str(tokens), "middle") for tokens in range(0, longest + 1, 2)),
        _text(x(longest / 2), _HEIGHT - 6, "proposed tokens (K)", "middle"),
        _text(16, 24, "Speed-up over the target alone", "start", 15),
    ]
    lines = [part for index, item in enumerate(plans.items()) for part in line(index, *item)]
    return _document([*axes, *lines])


def _document(body: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="system-ui, sans-serif" font-size="11" role="img">',
            "<title>Speed-up over the target alone by proposal length</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, words: str, anchor: str, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
