"""The log tells of each stretch of activity once, and counts what has ended."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.completion import Completion, Limits
from coordinator.figures import record_round
from coordinator.figures_log import FiguresLog
from coordinator.requests import ActiveRequest
from coordinator.text import Detokenizer, StopStrings
from coordinator.tokenizer import read_tokenizer
from tandem.types import SpeculationFigures
from tests.paths import DEMO_TARGET

TOKENIZER = read_tokenizer({"tokenizer.json": (DEMO_TARGET / "tokenizer.json").read_bytes()})


def figures_of(*rounds: tuple[int, int]) -> SpeculationFigures:
    figures = SpeculationFigures()
    for drafted, accepted in rounds:
        record_round(figures, drafted, accepted)
    return figures


def request_on(draft: str | None, target: str) -> ActiveRequest:
    completion = Completion(
        (1,), Limits(64, 32), Detokenizer(TOKENIZER), StopStrings(()), request_id="a", seed=0
    )
    return ActiveRequest("a", completion, 1, "strict", 2, draft_address=draft, target_address=target)


def advance(request: ActiveRequest, *rounds: tuple[int, int]) -> None:
    for drafted, accepted in rounds:
        record_round(request.completion.figures, drafted, accepted)


async def test_a_line_for_each_interval_with_activity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FiguresLog(interval_seconds=0.05)
    request = request_on("d:1", "t:1")
    with log.following(request):
        advance(request, (2, 2), (2, 0), (2, 1))
        assert caplog.messages == []
        await asyncio.sleep(0.2)
        assert caplog.messages == [
            "Draft Tokens: 3/6 (50.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [67%, 33%] |"
        ]
        assert vars(caplog.records[0])["draft"] == "d:1"
        assert vars(caplog.records[0])["target"] == "t:1"
        advance(request, (2, 2))
    log.close()
    assert caplog.messages[1:] == [
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |"
    ]


async def test_each_pair_has_its_line_before_the_one_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FiguresLog(interval_seconds=30.0)
    good, bad = request_on("d:1", "t:1"), request_on("d:2", "t:1")
    with log.following(good), log.following(bad):
        advance(good, (2, 2))
        advance(bad, (2, 0))
    log.close()
    assert caplog.messages == [
        "Draft Tokens: 0/2 (0.00%) accepted, Acceptance Len: 0.00 / 2 toks, Per-Pos: [0%, 0%] |",
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |",
        "Draft Tokens: 2/4 (50.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [50%, 50%] |",
    ]
    assert [vars(record).get("draft") for record in caplog.records] == ["d:2", "d:1", None]


async def test_a_request_that_loses_its_draft_is_told_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FiguresLog(interval_seconds=0.05)
    request = request_on("d:1", "t:1")
    with log.following(request):
        await asyncio.sleep(0.1)
        request.draft_address = None
        advance(request, (2, 1))
    log.close()
    assert [vars(record)["draft"] for record in caplog.records] == ["d:1"]


def test_what_has_ended_is_counted_by_rule() -> None:
    log = FiguresLog()
    log.add("residual", figures_of((2, 2), (2, 0)))
    log.add("strict", figures_of((2, 1)))
    log.add("strict", figures_of((2, 2)))
    assert log.cumulative.total.drafted == 8
    assert {rule: figures.accepted for rule, figures in log.cumulative.by_rule.items()} == {
        "residual": 2,
        "strict": 3,
    }


async def test_requests_without_proposals_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FiguresLog()
    request = request_on(None, "t:1")
    with log.following(request):
        advance(request, (0, 0))
    log.close()
    log.close()
    assert caplog.messages == []
