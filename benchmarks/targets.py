"""Compares a run with the figures to be reached on a CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.reports.report import Report, Target

_VLLM = ("vllm", "vllm-ngram", "vllm-draft")
_ASSISTED = ("assisted", "assisted-defaults")


def targets_of(report: Report) -> tuple[Target, ...]:
    """Each of them, whether measured or not."""
    return tuple(_targets(report))


def _targets(report: Report) -> Iterator[Target]:
    for temperature in (0.0, 1.0):
        yield _at_least(
            f"speculative through the services, by the same loop in one process: batch 1, temperature {temperature:g}",
            0.90,
            _ratio(report, ("speculative", 1), ("one-process", 1), temperature),
        )
    yield _at_least(
        "speculative, by the better of transformers' assisted generations: batch 1, temperature 0",
        1.5,
        _by_best(report, _ASSISTED),
    )
    yield _at_least(
        "speculative, by transformers generate: batch 1, temperature 0",
        2.0,
        _ratio(report, ("speculative", 1), ("transformers", 1), 0.0),
    )
    yield _at_least(
        "speculative, by the best mode of vLLM: batch 1, temperature 0", 1.0, _by_best(report, _VLLM)
    )
    for temperature in (0.0, 1.0):
        yield _at_least(
            f"speculative, by the target alone: batch 16, temperature {temperature:g}",
            1.0,
            _ratio(report, ("speculative", 16), ("target-alone", 16), temperature),
        )
    yield _at_least(
        "the target alone at batch 16, by itself at batch 1: temperature 0",
        6.0,
        _ratio(report, ("target-alone", 16), ("target-alone", 1), 0.0),
    )
    yield _judged(
        "time to first token when the first 512 tokens were served before, by the first time",
        f"at most {0.25:g}",
        None if report.prefix is None else report.prefix.ratio,
        lambda reached: reached <= 0.25,
    )


def _at_least(name: str, needed: float, reached: float | None) -> Target:
    return _judged(name, f"at least {needed:g}", reached, lambda value: value >= needed)


def _judged(name: str, needed: str, reached: float | None, is_enough: Callable[[float], bool]) -> Target:
    met = None if reached is None else is_enough(reached)
    return Target(name=name, needed=needed, reached=reached, is_met=met)


def _ratio(report: Report, one: tuple[str, int], other: tuple[str, int], temperature: float) -> float | None:
    """Median over rounds of the ratio within a round, which a machine that slows down affects least."""
    cells = [report.cell(name, batch, temperature) for name, batch in (one, other)]
    if cells[0] is None or cells[1] is None:
        return None
    pairs = zip(cells[0].tokens_per_second, cells[1].tokens_per_second, strict=True)
    return statistics.median(a / b for a, b in pairs)


def _by_best(report: Report, others: Sequence[str]) -> float | None:
    ratios = [_ratio(report, ("speculative", 1), (name, 1), 0.0) for name in others]
    return min((ratio for ratio in ratios if ratio is not None), default=None)
