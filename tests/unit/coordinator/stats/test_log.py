"""The log has a line for each interval with activity, and counts every round."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.stats.log import StatsLog
from tests.unit.coordinator.round_results import round_result


def count(
    log: StatsLog, draft: str | None, target: str, *rounds: tuple[int, int], rule: str = "strict"
) -> None:
    for proposed, accepted in rounds:
        log.round_ended(rule, round_result(proposed, accepted, draft=draft, target=target))


async def test_a_line_for_each_interval_with_activity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog(interval_seconds=0.05)
    count(log, "d:1", "t:1", (2, 2), (2, 0), (2, 1))
    assert caplog.messages == []
    await asyncio.sleep(0.2)
    assert caplog.messages == [
        "Draft Tokens: 3/6 (50.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [67%, 33%] |"
    ]
    assert vars(caplog.records[0])["draft"] == "d:1"
    assert vars(caplog.records[0])["target"] == "t:1"
    count(log, "d:1", "t:1", (2, 2))
    log.close()
    assert caplog.messages[1:] == [
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |"
    ]


async def test_each_pair_has_its_line_before_the_one_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog(interval_seconds=30.0)
    count(log, "d:2", "t:1", (2, 0))
    count(log, "d:1", "t:1", (2, 2))
    log.close()
    assert caplog.messages == [
        "Draft Tokens: 0/2 (0.00%) accepted, Acceptance Len: 0.00 / 2 toks, Per-Pos: [0%, 0%] |",
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |",
        "Draft Tokens: 2/4 (50.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [50%, 50%] |",
    ]
    assert [vars(record).get("draft") for record in caplog.records] == ["d:2", "d:1", None]


async def test_rounds_before_the_first_draft_have_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog()
    count(log, None, "t:1", (0, 0))
    count(log, "d:1", "t:1", (2, 2))
    log.close()
    assert caplog.messages == [
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [100%, 100%] |"
    ]
    assert [vars(record)["draft"] for record in caplog.records] == ["d:1"]


async def test_every_round_is_counted_by_rule() -> None:
    log = StatsLog()
    count(log, "d:1", "t:1", (2, 2), (2, 0), rule="residual")
    count(log, "d:1", "t:1", (2, 1), (2, 2))
    total, by_rule = log.cumulative.snapshot()
    log.close()
    assert total.drafted == 8
    assert {rule: stats.accepted for rule, stats in by_rule.items()} == {"residual": 2, "strict": 3}


async def test_requests_without_proposals_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog()
    count(log, None, "t:1", (0, 0))
    log.close()
    log.close()
    assert caplog.messages == []
