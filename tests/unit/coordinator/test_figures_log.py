"""The log tells of each stretch of activity once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.figures import record_round
from coordinator.figures_log import FiguresLog
from tandem.types import SpeculationFigures


def figures_of(*rounds: tuple[int, int]) -> SpeculationFigures:
    figures = SpeculationFigures()
    for drafted, accepted in rounds:
        record_round(figures, drafted, accepted)
    return figures


async def test_a_line_for_each_interval_with_activity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FiguresLog(interval_seconds=0.05)
    log.add("residual", figures_of((2, 2), (2, 0)))
    log.add("strict", figures_of((2, 1)))
    assert caplog.messages == []
    await asyncio.sleep(0.2)
    assert caplog.messages == [
        "Draft Tokens: 3/6 (50.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [67%, 33%] |"
    ]
    log.add("strict", figures_of((2, 2)))
    log.close()
    assert caplog.messages[1:] == [
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |"
    ]
    assert log.cumulative.total.drafted == 8
    assert {rule: figures.accepted for rule, figures in log.cumulative.by_rule.items()} == {
        "residual": 2,
        "strict": 3,
    }


async def test_requests_without_proposals_are_counted_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = FiguresLog()
    log.add("strict", figures_of((0, 0)))
    log.close()
    log.close()
    assert caplog.messages == []
    assert log.cumulative.total.rounds == 1
