"""An audit as JSON and as a page of HTML with pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from tandem_audit import __version__
from tandem_audit.run import MAIN, Audit
from tandem_audit.statistics import ALPHA, CONFIDENCES, LEVEL, POSITIONS, TestResult

_WIDTH = 720
_HEIGHT = 260
_LEFT = 64
_BOTTOM = 52
_TOP = 16
_RED = "#b91c1c"
_BLUE = "#1d4ed8"
_GREY = "#64748b"


def as_dict(audit: Audit) -> dict[str, Any]:
    """In the types that JSON has; numbers that are not finite become null."""
    speculation = audit.speculation
    described: dict[str, Any] = asdict(audit) | {
        "version": __version__,
        "verdict": audit.verdict,
        "findings": audit.findings,
        "tests": [{"look": look, **asdict(test)} for look, tests in audit.tests.items() for test in tests],
        "checks": [asdict(each) | {"verdict": each.verdict.value} for each in audit.checks],
        "speculation": None
        if speculation is None
        else asdict(speculation) | {"tokens_per_pass": speculation.tokens_per_pass},
    }
    plain: dict[str, Any] = _plain(described)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(float(value), 8) if math.isfinite(value) else None
    return value


def acceptance_line(audit: Audit) -> str:
    """Speculation meanwhile, from the server's metrics; empty where it has none."""
    counts = audit.speculation
    if counts is None or counts.tokens_per_pass is None:
        return ""
    words = f"{counts.tokens_per_pass:.2f} tokens a pass"
    if counts.drafted:
        words += f", {counts.accepted / counts.drafted:.1%} of {counts.drafted:,.0f} proposed tokens accepted"
    if counts.drafts and counts.per_position:
        rates = ", ".join(f"{each / counts.drafts:.0%}" for each in counts.per_position)
        words += f" (by position {rates})"
    return words + (f", rule {', '.join(sorted(counts.rules))}" if counts.rules else "")


def strongest(audit: Audit, count: int = 8) -> list[tuple[str, TestResult]]:
    """The tests with the smallest p-values, with the look that each belongs to."""
    found = [(look, test) for look, tests in audit.tests.items() for test in tests if test.p is not None]
    return sorted(found, key=lambda each: each[1].p or 0.0)[:count]


def html(audit: Audit) -> str:
    """A page that stands alone."""
    main = {test.name: test for test in audit.tests.get(MAIN, [])}

    def chosen(names: Iterable[str]) -> list[TestResult]:
        return [main[name] for name in names if name in main]

    ranks = chosen(["first choice", "first 2", "first 4", "first 8", "surprise"])
    confidences = chosen(f"first choice at confidence {low:g} to {high:g}" for low, high in CONFIDENCES)
    positions = chosen(f"first choice at position {i}" for i in range(POSITIONS))
    modulo = [test for name, test in main.items() if " modulo " in name]
    pictures = [
        ("Sequential evidence against the server", evidence_picture(audit)),
        ("Drawn minus expected, by rank", bias_picture(ranks)),
        ("The first choice, by its probability", bias_picture(confidences)),
        ("The first choice, by position in the completion", bias_picture(positions)),
        ("The first choice, by position modulo K + 1", bias_picture(modulo)),
    ]
    checks = _rows([each.verdict.value, each.name, each.detail] for each in audit.checks)
    tests = _rows(
        [
            *(look, test.name, f"{test.tokens:,}", f"{test.excess:+.4f}"),
            *(f"z {test.z:+.2f}", f"p {_number(test.adjusted_p)}"),
        ]
        for look, test in strongest(audit, 1000)
    )
    reference = _rows(
        [test.name, f"{test.tokens:,}", _number(test.p), _number(test.adjusted_p)] for test in audit.reference
    )
    findings = "".join(f"<li>{escape(each)}</li>" for each in audit.findings)
    parts = [
        f"<h1>{escape(audit.url)}: {escape(audit.verdict)}</h1>",
        f"<p>Model {escape(audit.model)}, {escape(audit.began)}, {audit.seconds:.0f} s, {audit.requests:,} requests, "
        f"{audit.tokens:,} tokens, tandem-audit {__version__}. {escape(acceptance_line(audit))}</p>",
        f"<ul class=findings>{findings}</ul>" if findings else "",
        *(f"<h2>{title}</h2>{picture}" for title, picture in pictures if picture),
        f"<h2>Checks</h2><table>{checks}</table>",
        f"<h2>Against the reference</h2><table>{reference}</table>" if reference else "",
        f"<h2>Draws against reported probabilities</h2><table>{tests}</table>" if tests else "",
    ]
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.1rem .8rem .1rem 0;vertical-align:top}svg{max-width:100%}.findings{color:#b91c1c}"
    )
    head = f"<meta charset=utf-8><title>Audit of {escape(audit.url)}</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def bias_picture(tests: Sequence[TestResult]) -> str:
    """Drawn minus expected for each token, with bars of 3.3 standard errors (99.9 %). SVG; empty without tests."""
    shown = [(test, abs(test.excess / test.z) if test.z else 0.0) for test in tests if test.tokens]
    if not shown:
        return ""
    limit = max(abs(test.excess) + 3.3 * error for test, error in shown) or 1.0
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    scale = (middle - _TOP) / limit
    step = (_WIDTH - _LEFT) / len(shown)
    body = _axis(middle, "0") + _text(_LEFT - 6, _TOP + 8, f"{limit:+.3f}", "end")
    for i, (test, error) in enumerate(shown):
        x = _LEFT + (i + 0.5) * step
        y = middle - test.excess * scale
        colour = _RED if test.adjusted_p is not None and test.adjusted_p < ALPHA / 2 else _BLUE
        body += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3.3 * error * scale:.1f}" '
        body += f'y2="{y + 3.3 * error * scale:.1f}" stroke="{colour}" stroke-width="2"/>'
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
        name = test.name.removeprefix("first choice at ").replace("confidence ", "").replace("position ", "")
        body += _text(x, _HEIGHT - 28, name, "middle") + _text(x, _HEIGHT - 12, f"z {test.z:+.1f}", "middle")
    return _svg(body)


def evidence_picture(audit: Audit) -> str:
    """log10 of the e-process by tokens, with the level of a finding. SVG; empty without samples."""
    if not audit.path:
        return ""
    values = [max(-3.0, min(value, 3 * LEVEL)) for _, value in audit.path]
    high = max(LEVEL, *values) * 1.1
    low = min(-1.0, *values)
    last = audit.path[-1][0]

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    points = " ".join(
        f"{_LEFT + tokens / max(last, 1) * (_WIDTH - _LEFT):.1f},{y(value):.1f}"
        for (tokens, _), value in zip(audit.path, values, strict=True)
    )
    body = _axis(y(0.0), "1") + _axis(y(LEVEL), f"{2 / ALPHA:.0f}")
    body += f'<polyline points="{points}" fill="none" stroke="{_BLUE}" stroke-width="2"/>'
    body += _text(_WIDTH, _HEIGHT - 28, f"{last:,} tokens", "end")
    return _svg(body + _text(_LEFT, _HEIGHT - 28, "above the upper line it is a finding", "start"))


def _axis(y: float, label: str) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GREY}" stroke-dasharray="4 4"/>'
    return line + _text(_LEFT - 6, y + 4, label, "end")


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="11" role="img"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>{body}</svg>'
    )
